"""PSA by labels on a GPU: labels and guesses of many rows, what the rule for guesses lets in, and recorded steps, each
against the host's path."""

from __future__ import annotations

import pytest
import torch
from device_helpers import device_of, take_off_device
from engine_helpers import tokens
from gpu_helpers import notes_of
from helpers import planted_heads
from label_cases import LabelledRows, same_labels
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.labels import recorded
from saccade.methods.psa import PSA
from saccade.ops import Call, run
from saccade.ops.progressive import attend_ranking
from saccade.ops.triton.batched_guesses import ordered_guesses
from saccade.ops.triton.batched_labels import estimate_labelled
from saccade.ops.triton.batched_reading import rank_rows
from saccade.ops.triton.common import arrivals, kept_zeros
from saccade.ops.triton.progressive import attend_progressive
from saccade.selection.forms import Rule

KEYS = {"rank": "keys", "rest": "estimate"}


@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size", "bits", "dtype"),
    [
        (8, 8, 64, 8, 4, torch.float32),
        (6, 2, 128, 32, 2, torch.bfloat16),
        (32, 8, 128, 32, 4, torch.bfloat16),
        (14, 2, 64, 16, 8, torch.float16),
        (8, 1, 256, 128, 4, torch.bfloat16),
        (4, 2, 256, 64, 8, torch.float32),
        (4, 1, 80, 16, 4, torch.float16),
    ],
)
def test_labels_and_estimates_are_the_hosts(heads, kv_heads, dim, size, bits, dtype, softcap):
    method = PSA(block_size=size, bits=bits, microbatch=2, **KEYS)
    lengths = [5003, 0, 4096, method.dense_upto, method.dense_upto + 1, 2048 + size - 1, 0, 3 * 1024]
    prompts = [5002, 0, 3000, 50, 30, 63, 0, 64]
    rows = LabelledRows(method, lengths, prompts, heads, kv_heads, dim, dtype, "cuda")
    got = estimate_labelled(rows.q, rows.pages, rows.words, rows.choice, rows.dense_upto, dim**-0.5, softcap).blocks
    for row, length in enumerate(lengths):
        if not length:
            continue
        host, stop = rows.host_labels(row), length // size - 1
        same_labels(rows.labels[row], host, length)
        if length > method.dense_upto:
            want = host.block_weights(rows.query(row, dim**-0.5, softcap).q[:, 0], size, dim**-0.5, softcap, 2, stop)
            torch.testing.assert_close(got[row, :, 2:stop], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stop", ["all", "mean"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1), (32, 8)])
def test_what_is_read_is_what_the_host_reads(heads, kv_heads, stop):
    method = PSA(0.9, 16, 3, stop=stop, **KEYS)
    lengths = [4001, 0, 2500, 100, 3000, 130]
    rows = LabelledRows(method, lengths, [4000, 0, 40, 90, 1000, 70], heads, kv_heads, 64, device="cuda")
    reach = torch.zeros(len(lengths), kv_heads, dtype=torch.int32, device="cuda")
    for _ in range(3):  # the next steps know how far the first one went
        ranked = rank_rows(rows.q, rows.pages, None, rows.words, rows.choice, rows.dense_upto, 0.25, None)
        done = attend_progressive(
            rows.q, rows.pages, ranked.always, ranked.order, 16, Rule(1.0, 3, "estimate", stop, 0.5), scale=0.25,
            counts=ranked.counts, guesses=ranked.guesses, before=reach,
            epsilon=torch.full((len(lengths),), 0.9, device="cuda"),
        )  # fmt: skip
        stopped = 0
        for row, length in enumerate(lengths):
            if length <= method.dense_upto:
                continue
            query, entries = rows.query(row, 0.25), slice(row * kv_heads, (row + 1) * kv_heads)
            ranking = method.select_decode(query, rows.host_labels(row))
            out, lse, used, coverage = attend_ranking(query.q, query.kv, ranking, scale=0.25)
            torch.testing.assert_close(done.out[row], out[:, 0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(done.lse[row], lse[:, 0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(done.coverage[entries].cpu(), coverage, atol=1e-3, rtol=1e-3)
            count, always = ranking.order.shape[1], ranking.always.shape[1]
            blocks = [always + min(count, 3 * one) for one in done.used[entries].tolist()]
            assert blocks == used.block_mask().sum((1, 2)).tolist()
            stopped += sum(one < always + count for one in blocks)
        assert stopped
    assert not kept_zeros(rows.q.device, 1 << 20).any()
    assert not arrivals(rows.q.device, 64).any()


@pytest.mark.parametrize("rank", ["keys", "moments"])
@pytest.mark.parametrize(("size", "microbatch", "stop"), [(16, 1, "all"), (32, 4, "mean"), (128, 2, "all")])
def test_rankings_of_one_row_stop_where_the_loop_stops(rank, size, microbatch, stop):
    q, k, v = (part.cuda() for part in planted_heads(8, 2, 8000, 64, 3))
    view = KVView.from_tensors(k, v, shuffle_seed=1)
    for epsilon in (0.5, 0.9, 0.98, 1.0):
        query = Query.of(q[:, -1:], view)
        method = PSA(epsilon, size, microbatch, rank=rank, rest="estimate", stop=stop)
        ranking = method.select_decode(query, method.begin(query))
        got, expected = (run(Call.of(query.q, view, ranking), name) for name in ("triton", "reference"))
        assert torch.equal(got.used.block_mask().cpu(), expected.used.block_mask().cpu())
        torch.testing.assert_close(got.out, expected.out, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.coverage.cpu(), expected.coverage, atol=1e-3, rtol=1e-3)


def test_guesses_of_long_orders():
    rng, blocks = torch.Generator().manual_seed(1), 9000
    estimates, counts = 50 * torch.randn(2, 4, blocks, generator=rng), [9000, 4097, 1, 0]
    order = torch.stack([torch.randperm(blocks, generator=rng) for _ in counts]).to(torch.int32)
    given = torch.tensor([[0] * 4, counts], dtype=torch.int32).cuda()
    got = ordered_guesses(estimates.cuda(), order.cuda(), given, 4)
    for row in range(2):
        for head in range(4):
            unit = row * 2 + head // 2
            own = estimates[row, head, order[unit, : counts[unit]].long()].double()
            rest = torch.logcumsumexp(own.flip(0), 0).flip(0)[::4] / 0.6931471805599453
            left = got.left[row, head, : len(rest) + 1].cpu().double()
            assert left[-1] == -torch.inf
            torch.testing.assert_close(left[:-1], rest, atol=1e-3, rtol=1e-5)
            assert torch.allclose(got.blocks[row, head, : counts[unit]].cpu().double(), own / 0.6931471805599453)


def test_answers_do_not_change_from_run_to_run():
    """Races would show: programs that read, publish and follow the rule at once."""
    method = PSA(0.9, 32, 4, **KEYS)
    rows = LabelledRows(method, [20_000 - 37 * at for at in range(8)], [9000] * 8, 32, 8, 128, torch.bfloat16, "cuda")
    reach, found = torch.zeros(8, 8, dtype=torch.int32, device="cuda"), []
    for _ in range(20):
        ranked = rank_rows(rows.q, rows.pages, None, rows.words, rows.choice, rows.dense_upto, 0.1, None)
        rule = Rule(0.9, 4, "estimate", "all", 0.5)
        found.append(
            attend_progressive(
                rows.q, rows.pages, ranked.always, ranked.order, 32, rule, scale=0.1, counts=ranked.counts,
                guesses=ranked.guesses, before=reach,
            )
        )  # fmt: skip
    for one in found[1:]:
        assert torch.equal(one.used, found[0].used)
        torch.testing.assert_close(one.coverage, found[0].coverage)
        torch.testing.assert_close(one.out, found[0].out, atol=2e-2, rtol=2e-2)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Without recorded steps, and with them: one random float32 Llama."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=4096, head_dim=64)
    made = [
        LLM(folder, kv_memory="128MiB", prefill_chunk=512, device="cuda", exact=False, enable_prefix_caching=False)
        for _ in range(2)
    ]
    take_off_device(made[0])
    return made


POLICIES = [
    "psa(epsilon=0.6, block_size=16, microbatch=1, rank=keys, rest=estimate)",
    "psa(epsilon=0.9, block_size=16, microbatch=2, rank=keys, rest=estimate, bits=8, margin=0.2, stop=mean)",
    "psa(epsilon=0.8, rank=keys, rest=estimate, bits=2)",
    "psa(epsilon=0.8, block_size=16, microbatch=2, rank=keys)",
    "psa(epsilon=0.8, block_size=16, microbatch=8, rank=moments, rest=estimate)",
]
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = [random_ids(length, seed=length) for length in (50, 900, 63, 301, 64)]


def same(left, right) -> None:
    assert right.error is None, right.error
    assert tokens(left) == tokens(right)
    wanted, got = left.report["decode"], right.report["decode"]
    assert set(got["backends"]) == {"triton"}
    for name in ("keys_attended", "keys_causal", "keys_estimated", "selections"):
        assert wanted[name] == got[name], name
    said = wanted["coverage_estimated"]
    assert got["coverage_estimated"] == (None if said is None else pytest.approx(said, abs=1e-3))
    assert notes_of(left) == notes_of(right)


@pytest.mark.parametrize("policy", POLICIES)
def test_recorded_steps_give_what_the_host_gives(engines, policy, monkeypatch):
    """Prompts with a frame and without one, rows that begin dense, and labels that outgrow their room."""
    monkeypatch.setattr(recorded, "AHEAD", 16)
    for left, right in zip(*(engine.generate(PROMPTS, LONG, policy=policy) for engine in engines)):
        same(left, right)
    assert device_of(engines[1]).graphs.recorded > 0


def test_all_side_by_side(engines):
    policies = [*POLICIES, "dense", "psa(epsilon=0.9)", POLICIES[0], POLICIES[1], "arkvale(budget=128)"]
    prompts = [random_ids(100 + 61 * at, seed=at) for at in range(len(policies))]
    params = [SamplingParams(temperature=0, max_tokens=5 + 7 * at, ignore_eos=True) for at in range(len(policies))]
    for left, right in zip(*(engine.generate(prompts, params, policy=policies) for engine in engines)):
        same(left, right)


def test_turns_and_samples(engines):
    policy, answers = POLICIES[0], []
    for one in engines:
        with one.session(policy=policy) as session:
            answers.append([session.generate(PROMPTS[at], LONG) for at in (1, 0, 3)])
        params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True, n=3, seed=7)
        (several,) = one.generate(PROMPTS[3], params, policy=policy)
        answers[-1].append([output.token_ids for output in several.outputs])
    for left, right in zip(answers[0][:3], answers[1][:3]):
        same(left, right)
    assert answers[0][3] == answers[1][3]


@pytest.mark.parametrize(("slots", "unit"), [(60, "block"), (60, "head")])
def test_keys_in_host_memory(tmp_path_factory, slots, unit):
    """A part of the keys lies in host memory: labels are on the GPU all the same, and rank what is to be brought in."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, head_dim=32)
    prompts = [random_ids(length, seed=length) for length in (180, 240, 333)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    policy, settings = POLICIES[0], {"dtype": "float32", "prefill_chunk": 64, "device": "cuda", "exact": False}
    with LLM(folder, kv_memory="64MiB", **{"enable_prefix_caching": False, **settings}) as whole:
        expected = [tokens(one) for one in whole.generate(prompts, params, policy=policy)]
    with LLM(
        folder,
        kv_memory=slots * 2 * 2 * 32 * 32 * 4,
        kv_host="64MiB",
        kv_unit=unit,
        **{"enable_prefix_caching": False, **settings},
    ) as llm:
        done = llm.generate(prompts, params, policy=policy)
        assert [one.error for one in done] == [None] * 3
        assert [tokens(one) for one in done] == expected
        assert llm.pool.tiers.counts.misses > 0
        assert sum(one.report["decode"]["backends"].get("triton", 0) for one in done) > 0
