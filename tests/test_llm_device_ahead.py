"""Steps that the device backend launches before they are asked for change no token, count or stored key. CPU tensors,
Triton's interpreter, no graphs."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import Once, device_of, put_on_device
from engine_helpers import finish, start, tokens
from tier_helpers import nothing_left
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams, copied
from saccade.engine.device import prepare as device_prepare
from saccade.engine.device import rows as device_rows
from saccade.engine.device.ahead import Ahead
from saccade.kv.format import KVFormat
from saccade.methods.policy import Policy
from saccade.ops.triton import batched_rows

ROCKET = "rocketkv(capacity=32, window=8, kernel=5, keys=12, block_size=3)"


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048, **small)
    own, batched = (
        LLM(folder, kv_memory="16MiB", prefill_chunk=256, exact=False, enable_prefix_caching=False) for _ in range(2)
    )
    put_on_device(batched)
    device_of(batched).runs_ahead = True
    return own, batched


@pytest.fixture
def asked(monkeypatch):
    """Whether each step that was launched ahead was the one that came."""
    seen: list[bool] = []
    real = Ahead.serves

    def noted(self, step, placed, key):
        seen.append(real(self, step, placed, key))
        return seen[-1]

    monkeypatch.setattr(Ahead, "serves", noted)
    return seen


def greedy(count: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)


def same(own, batched) -> None:
    assert batched.error is None
    assert tokens(own) == tokens(batched)
    left, right = own.report["decode"], batched.report["decode"]
    for name in ("tokens", "keys_attended", "keys_causal", "keys_estimated", "density_per_head", "selections"):
        assert left[name] == right[name], name


def test_rows_of_unlike_lengths_and_ends(engines, asked):
    """A block of keys fills on the way, in two rows; one request ends before the others."""
    prompts = [random_ids(length, seed=length) for length in (30, 20, 158)]
    policies = ["dense", "streaming(sinks=2, window=16)", "arkvale(budget=96)"]
    own, batched = (one.generate(prompts, [greedy(6), greedy(3), greedy(6)], policy=policies) for one in engines)
    for left, right in zip(own, batched):
        same(left, right)
    assert asked == [True] * 3  # of five steps: the first of each set of rows is loaded
    assert engines[1].engine.pool.used_blocks == 0


def test_kept_prefixes_make_room_for_steps_ahead(engines, asked):
    """A server's pool is full of what ended requests left; a row that goes on into a new block takes theirs."""
    folder, prompts = engines[0].config.model, [random_ids(200, seed=number) for number in range(3)]
    with LLM(folder, kv_memory="512KiB", prefill_chunk=256, exact=False, enable_prefix_caching=True) as llm:
        put_on_device(llm)
        device_of(llm).runs_ahead = True
        llm.generate(prompts, greedy(1))
        pool, kept = llm.engine.pool, len(llm.engine.prefixes)
        assert not pool.roomy
        asked.clear()
        (one,) = llm.generate([random_ids(30, seed=9)], greedy(6))
        assert asked == [True] * 4  # of five steps, the first of which is loaded
        assert len(llm.engine.prefixes) <= kept
        (alone,) = engines[0].generate([random_ids(30, seed=9)], greedy(6))
        same(alone, one)


def test_a_request_that_ends_by_a_token_leaves_one_step_unasked(engines, asked):
    prompts = [random_ids(25, seed=length) for length in (1, 2)]
    free = [tokens(one) for one in engines[0].generate(prompts, greedy(6))]
    assert free[0][2] not in free[0][:2]
    params = [greedy(6, stop_token_ids=[free[0][2]]), greedy(6)]
    own, batched = (one.generate(prompts, params) for one in engines)
    for left, right in zip(own, batched):
        same(left, right)
    assert len(tokens(batched[0])) == 3
    assert False in asked
    assert True in asked


def test_who_drafts_no_more_goes_on(engines, asked, monkeypatch):
    """A draft that cannot pay is dropped at once, and its request's steps are as those of dense decoding."""
    monkeypatch.setattr(engines[1].engine.sparse_drafts.pacing, "weights", 1 << 40)
    prompts = [random_ids(length, seed=length) for length in (37, 55)]
    (own, alike), batched = (
        engines[0].generate(prompts, greedy(6), policy="dense"),
        engines[1].generate(prompts, greedy(6), policy="lossless(draft=streaming(sinks=2, window=16))"),
    )
    for left, right in zip((own, alike), batched):
        assert right.error is None
        assert tokens(left) == tokens(right)
        assert right.report["speculation"]["off"] is not None
        assert right.report["speculation"]["verifications"] == 0
        assert left.report["decode"]["keys_attended"] == right.report["decode"]["keys_attended"]
    assert asked.count(True) >= 3


@pytest.mark.parametrize("policy", ["quest(budget=64, dense_layers=1)", "streaming(sinks=2, window=16)"])
def test_audits_of_steps_that_were_launched_ahead(engines, asked, policy):
    """They look at their own step, though the next one was launched before they were counted."""
    prompts = [random_ids(length, seed=length) for length in (140, 230)]
    params = [greedy(7, audit=0.5, seed=3), greedy(7)]
    own, batched = (one.generate(prompts, params, policy=policy) for one in engines)
    for left, right in zip(own, batched):
        same(left, right)
    host, there = own[0].report["audit"], batched[0].report["audit"]
    assert host["places"] == there["places"] == 6 * 2
    for name in ("retained_mass", "output_error", "output_error_scaled"):
        assert host[name]["samples"] == there[name]["samples"] > 0
        assert there[name]["mean"] == pytest.approx(host[name]["mean"], abs=1e-4), name
    assert asked.count(True) >= 4


def test_replays_of_steps_that_were_launched_ahead(engines, asked):
    """All rows of a step, of whatever policy, share its dense replay, each at its own rate. It changes no token, count
    or stored key, and the device runs it with the step."""
    prompts = [random_ids(length, seed=length) for length in (100, 70, 80)]
    policies = ["quest(budget=64, dense_layers=1)", "psa(epsilon=0.4, microbatch=1)", "streaming(sinks=2, window=16)"]
    params = [greedy(7, audit_steps=0.4, seed=3), greedy(7), greedy(7, audit_steps=1.0)]
    worker, ran = engines[1].engine.worker, []
    real = worker.run
    worker.run = lambda step, *args, **options: ran.append(len(step)) or real(step, *args, **options)
    try:
        own, batched = (one.generate(prompts, params, policy=policies) for one in engines)
    finally:
        del worker.run
    for left, right in zip(own, batched):
        same(left, right)
    assert ran == [3] * 7  # the prompts, and each step once
    for number, most in ((0, 5), (2, 6)):
        host, there = (one[number].report["audit"] for one in (own, batched))
        assert host["steps"] == there["steps"] == 6
        assert host["agreement"] == there["agreement"]
        assert 0 < there["divergence"]["samples"] == host["divergence"]["samples"] <= most
        assert there["divergence"]["mean"] == pytest.approx(host["divergence"]["mean"], abs=1e-5)
    assert batched[2].report["audit"]["agreement"]["samples"] == 6
    assert asked == [True] * 5
    assert engines[1].engine.pool.used_blocks == 0


@pytest.mark.parametrize("slots", [48, 17])
def test_over_host_memory_while_everything_is_resident(engines, asked, slots):
    """Steps go on by themselves as without a tier, blocks fill on the way; once something is absent none does."""
    size = KVFormat(torch.float32, 1, 32, 32).block_bytes
    with LLM(
        engines[0].model.path,
        kv_memory=slots * size,
        kv_host="4MiB",
        prefill_chunk=256,
        exact=False,
        enable_prefix_caching=False,
    ) as tiered:
        put_on_device(tiered)
        device_of(tiered).runs_ahead = True
        prompts = [random_ids(length, seed=length) for length in (150, 158)]
        own, batched = (
            one.generate(prompts, greedy(8), policy="streaming(sinks=2, window=16)") for one in (engines[0], tiered)
        )
        for left, right in zip(own, batched):
            same(left, right)
        moved = tiered.engine.pool.tiers.counts.misses
        assert (asked.count(True) >= 5 and not moved) if slots == 48 else (moved and not asked)
        nothing_left(tiered.engine.pool)


def test_who_draws_goes_on(engines, asked):
    """Draws, steered tokens and their log-probabilities are those of their own steps; who does not ask for the device's
    choice, here under a constraint, does not go on."""
    prompts = [random_ids(length, seed=length) for length in (40, 31, 22)]
    params = [
        SamplingParams(max_tokens=6, seed=3, top_p=0.8, top_k=30, ignore_eos=True, logprobs=3),
        greedy(6, repetition_penalty=1.3, logit_bias={7: 2.5}),
        SamplingParams(max_tokens=6, seed=4, temperature=2.0, presence_penalty=0.5, min_p=0.01, ignore_eos=True),
    ]
    own, batched = (one.generate(prompts, params, policy=["dense", "topk(k=9)", "dense"]) for one in engines)
    for left, right in zip(own, batched):
        same(left, right)
    scores = [one[0].outputs[0].logprobs for one in (own, batched)]
    assert len(scores[0]) == len(scores[1]) == 6
    assert [list(entries) for entries in scores[0]] == [list(entries) for entries in scores[1]]
    assert asked == [True] * 4


@pytest.mark.parametrize("policy", ["psa(epsilon=0.4, microbatch=1)", "lfps(k=9, least=1)", ROCKET])
def test_methods_that_count_or_learn_go_on(engines, asked, policy):
    """What they count and learn is that of the steps that were asked for: one ends by a token while the step behind it
    runs, and its turn goes on with other tokens."""
    prompts = [random_ids(length, seed=length) for length in (50, 37)]
    free = tokens(engines[0].generate(prompts[0], greedy(4), policy=policy)[0])
    ends = next(at for at in range(2, 4) if free[at] not in free[:at])
    answers = []
    for engine in engines:
        params = [greedy(6, stop_token_ids=[free[ends]]), greedy(6)]
        first, second = engine.generate(prompts, params, policy=policy)
        with engine.session(policy=policy) as session:
            turns = [
                session.generate(prompts[0], greedy(6, stop_token_ids=[free[ends]])),
                session.generate(random_ids(5, seed=2), greedy(3)),
            ]
        answers.append([first, second, *turns])
    for left, right in zip(*answers):
        same(left, right)
        if "psa" in policy:
            for name in ("coverage_estimated", "coverage_estimated_least"):
                one, other = (part.report["decode"][name] for part in (left, right))
                assert one == pytest.approx(other, abs=1e-5), name
    assert asked.count(True) >= 3
    assert False in asked


def test_requests_that_come_and_go_in_between(engines, asked):
    own, batched = engines
    prompts = [random_ids(length, seed=length) for length in (33, 34, 35)]
    expected = [tokens(one.generate(prompt, greedy(6))[0]) for one, prompt in zip([own] * 3, prompts)]
    engine = batched.engine
    first = start(batched, prompts[0], greedy(6))
    for _ in range(3):
        engine.step()
    gone = start(batched, prompts[1], greedy(6))
    engine.step()
    assert asked == [True, True]  # the host's pass over a new prompt comes after it
    engine.step()
    engine.step()
    engine.cancel(gone)
    last = start(batched, prompts[2], greedy(6))
    finish(engine)
    assert [first.output_ids, last.output_ids] == [expected[0], expected[2]]
    assert gone.output_ids == expected[1][: len(gone.output_ids)]
    assert True in asked
    assert engine.pool.used_blocks == 0


def test_a_launch_that_fails_takes_back_its_step_alone(engines, asked, monkeypatch):
    own, batched = engines
    prompt = random_ids(40, seed=6)
    (expected,) = own.generate(prompt, greedy(6))
    fails = Once(batched_rows.attend_decode, ZeroDivisionError("it broke"), at=4)  # the step after the first
    monkeypatch.setattr(batched_rows, "attend_decode", fails)
    (output,) = batched.generate(prompt, greedy(6))
    same(expected, output)
    assert len([note for note in output.report["notes"] if "failed" in note]) == 1
    assert True in asked


def test_logits_that_are_not_finite_end_their_request(engines, monkeypatch):
    prompts = [random_ids(20, seed=8), random_ids(21, seed=9)]
    expected = tokens(engines[0].generate(prompts[1], greedy(5))[0])
    real = copied.Copied.wait
    turns = []

    def wait(self):
        turns.append(real(self))
        return [-1, turns[-1][1]] if len(turns) == 2 else turns[-1]

    monkeypatch.setattr(copied.Copied, "wait", wait)
    broken, whole = engines[1].generate(prompts, greedy(5))
    assert "finite" in broken.error
    assert whole.error is None
    assert tokens(whole) == expected


def test_blocks_of_all_rows_come_in_one_transfer(engines, monkeypatch):
    """Three rows go on into new blocks in one step; a table that has the right blocks is not written again."""
    put_on_device(engines[1])  # whose rows show nothing yet
    device_of(engines[1]).runs_ahead = True
    sizes = []
    monkeypatch.setattr(device_rows, "sent", lambda values, device: sizes.append(values.shape[1]) or values)
    prompts = [random_ids(30, seed=number) for number in range(3)]
    own, batched = (one.generate(prompts, greedy(6), policy="dense") for one in engines)
    for left, right in zip(own, batched):
        same(left, right)
    assert sizes == [3, 3]  # the first blocks as the rows begin, the second ones as they fill


def test_steps_prepared_before_requests_change_nothing(engines, monkeypatch):
    """Steps of padding store and count nothing; the kinds of step that requests take are known by then."""
    device, pool = device_of(engines[1]), engines[1].engine.pool
    device.kinds.clear()
    monkeypatch.setattr(device_prepare, "MOST_PIECES", 1)
    before = pool.storage.k.clone().view(torch.uint8)  # bits: unused memory may hold what is no number
    assert device.prepare(pool, Policy(), 2, 1024, seconds=0.0).recorded == 1  # the one that was begun
    prepared = device.prepare(pool, Policy(), 2, 1024, seconds=600.0)
    assert (prepared.recorded, prepared.wanted) == (3, 3)
    monkeypatch.setattr("saccade.engine.device.backend.MOST", 1)
    most = device.prepare(pool, Policy(), 2, 2048, seconds=600.0)
    assert (most.recorded, most.wanted) == (1, 6)
    assert torch.equal(pool.storage.k.view(torch.uint8), before)
    known = set(device.kinds._kinds)
    prompts = [random_ids(length, seed=length) for length in (33, 60)]
    left, right = (one.generate(prompts, greedy(3), policy="dense") for one in engines)
    for one, other in zip(left, right):
        same(one, other)
    assert set(device.kinds._kinds) == known
