"""The device backend on a GPU, its steps recorded in graphs: what it gives against the row path."""

from __future__ import annotations

import pytest
import torch
from device_helpers import Once, device_of, put_on_device, take_off_device
from engine_helpers import tokens
from gpu_helpers import notes_of
from kv_helpers import move_blocks
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.device import attention as device_attention
from saccade.kv.summaries import summarize_view
from saccade.kv.view import KVView
from saccade.ops import attend
from saccade.ops.triton.block_summaries import summarize
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.dispatch import pages_of
from saccade.selection import Dense, Shape

POLICIES = (
    "dense",
    "streaming(sinks=4, window=60)",
    "arkvale(budget=128)",
    "quest(budget=128, dense_layers=1)",
    "psa(epsilon=0.9)",
)
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [random_ids(length, seed=length) for length in (400, 37, 513, 290, 511)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Without batched steps, with steps launched one by one, with recorded ones: one random float32 Llama."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, head_dim=32)
    made = [
        LLM(
            folder,
            kv_memory="64MiB",
            prefill_chunk=256,
            device="cuda",
            exact=False,
            cuda_graphs=graphs,
            enable_prefix_caching=False,
        )
        for graphs in (False, False, True)
    ]
    take_off_device(made[0])
    return made


def counts(output):
    report = dict(output.report["decode"])
    return {name: report[name] for name in ("density_per_head", "keys_estimated", "retrievals", "selections")}


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_and_counts_equal_those_of_the_own_path(engines, policy):
    own, plain, recorded = (one.generate(PROMPTS, PARAMS, policy=policy) for one in engines)
    for left, middle, right in zip(own, plain, recorded):
        assert left.error is None
        assert tokens(left) == tokens(middle) == tokens(right)
        assert counts(left) == counts(middle) == counts(right)
        assert notes_of(right) == notes_of(left)
        for name in ("coverage_estimated", "coverage_estimated_least"):
            estimates = [one.report["decode"][name] for one in (left, middle, right)]
            assert estimates == pytest.approx([estimates[0]] * 3, abs=1e-4)
            assert policy != "psa(epsilon=0.9)" or estimates[0] is not None or len(left.prompt_token_ids) < 100
    graphs = device_of(engines[2]).graphs
    assert 0 < graphs.recorded <= graphs.kinds <= graphs.most
    assert graphs.bytes > 0
    assert device_of(engines[1]).graphs.recorded == 0


def test_recorded_steps_find_blocks_that_have_moved(engines, monkeypatch):
    """A graph reads the pool's map as it is replayed: blocks change their slots before every step."""
    expected = [tokens(one) for one in engines[1].generate(PROMPTS, PARAMS, policy=list(POLICIES))]
    device, moved = device_of(engines[2]), 0
    run = device.run

    def moving(step, memories, *times):
        nonlocal moved
        for one in step.scheduled:
            kv = memories[one.sequence_id].kv
            move_blocks(kv.pool, kv)
            moved += 1
        return run(step, memories, *times)

    monkeypatch.setattr(device, "run", moving)
    assert [tokens(one) for one in engines[2].generate(PROMPTS, PARAMS, policy=list(POLICIES))] == expected
    assert moved > 100
    assert device.graphs.recorded


def test_methods_side_by_side(engines):
    policies = [*POLICIES[:4], "topk(k=24)"]
    own, _, recorded = (one.generate(PROMPTS, PARAMS, policy=policies) for one in engines)
    for left, right in zip(own, recorded):
        assert tokens(left) == tokens(right)
        assert counts(left) == counts(right)


def test_turns(engines):
    answers = []
    for one in (engines[0], engines[2]):
        with one.session(policy="arkvale(budget=128)") as session:
            turns = [session.generate(ids, PARAMS) for ids in (PROMPTS[0], PROMPTS[1], PROMPTS[3])]
            answers.append([tokens(turn) for turn in turns])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("form", ["psa(epsilon={})", "arkvale(budget={})"])
def test_requests_of_one_form_share_their_graphs(engines, form):
    """As many numbers as requests, and other ones each time: no kind of step is added."""
    one, kinds = engines[2], set()
    for first in (0.0, 0.05):
        numbers = [round(0.5 + first + 0.1 * row, 2) for row in range(4)]
        policies = [form.format(number if "epsilon" in form else int(600 * number)) for number in numbers]
        answers = [engine.generate(PROMPTS[:4], PARAMS, policy=policies) for engine in (engines[0], one)]
        assert [tokens(output) for output in answers[0]] == [tokens(output) for output in answers[1]]
        kinds.add(frozenset(device_of(one).kinds._kinds))
    assert len(kinds) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("it broke"), torch.cuda.OutOfMemoryError("no memory")])
def test_one_failure_costs_one_step(tmp_path, monkeypatch, error):
    folder = make_checkpoint("llama", tmp_path / "llama", max_position_embeddings=2048, head_dim=32)
    one = LLM(folder, kv_memory="64MiB", prefill_chunk=256, device="cuda", exact=False, enable_prefix_caching=False)
    plain = one.generate(PROMPTS[0], PARAMS, policy="dense")[0]
    monkeypatch.setattr(device_attention, "append_rows", Once(device_attention.append_rows, error, at=2))
    output = one.generate(PROMPTS[0][:-1], PARAMS, policy="psa(epsilon=0.9)")[0]
    again = one.generate(PROMPTS[0], PARAMS, policy="dense")[0]
    assert any(str(error) in note for note in output.report["notes"])
    assert output.report["decode"]["backends"]["triton"] >= 3 * (PARAMS.max_tokens - 2)
    assert tokens(again) == tokens(plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_storage_is_served_and_recorded(tmp_path, dtype):
    """Where rounding may change a token, what is read still has its size."""
    folder = make_checkpoint("llama", tmp_path / "llama", max_position_embeddings=2048, head_dim=64)
    one = LLM(folder, kv_memory="64MiB", dtype=dtype, device="cuda", enable_prefix_caching=False)
    for policy in POLICIES:
        batched = one.generate(PROMPTS, PARAMS, policy=policy)
        assert device_of(one).kinds.records
        assert device_of(one).kinds.note is None
        take_off_device(one)
        own = one.generate(PROMPTS, PARAMS, policy=policy)
        put_on_device(one)
        for left, right in zip(own, batched):
            assert notes_of(right) == notes_of(left)
            assert right.report["decode"]["density"] == pytest.approx(left.report["decode"]["density"], rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_rows_of_unequal_length_agree_with_the_reference(dtype):
    rng = torch.Generator("cuda").manual_seed(0)
    lengths = (1, 64, 4001, 20000)
    k, v = torch.randn(2, 2, sum(lengths), 128, device="cuda", generator=rng).to(dtype)
    whole = KVView.from_tensors(k, v, shuffle_seed=0)
    views = [whole.upto(length) for length in lengths]
    q = torch.randn(4, 8, 128, device="cuda", generator=rng).to(dtype)
    out, _ = attend_decode(q, pages_of(views), None, scale=128**-0.5)
    for row, view in enumerate(views):
        shape = Shape.suffix(8, 2, 1, view.length)
        expected, _ = attend(
            q[row][:, None].float(),
            KVView.from_tensors(view.keys().float(), view.values().float()),
            Dense(shape),
            backend="reference",
        )
        error = (out[row][:, None].float() - expected).norm() / expected.norm()
        assert float(error) < 2e-2


@pytest.mark.parametrize(
    ("kind", "size"), [("minmax", 16), ("cuboid", 32), ("cuboid", 64), ("moments", 32), ("mean", 128)]
)
def test_a_prompts_blocks_are_summarized_where_they_lie(kind, size):
    """One launch, against torch on the CPU."""
    k, v = torch.randn(2, 4, 5000, 128).bfloat16()
    view = KVView.from_tensors(k, v, 16, shuffle_seed=2)
    expected = summarize_view(view, kind, size, 1, 5000 // size)
    there = KVView.from_tensors(k.cuda(), v.cuda(), 16, shuffle_seed=2)
    made = summarize(there.paged(), kind, size, 1, 5000 // size)
    torch.testing.assert_close(made.cpu(), expected, atol=1e-2, rtol=1e-2)
    if kind == "minmax":
        assert torch.equal(made.cpu(), expected)
