"""Requests that share steps: nobody's tokens depend on the company, on chunks, on preemption or on others' failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from helpers import MATRIX
from tiny_models import oracle, oracle_greedy, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.core import Engine
from saccade.kv.pool import BlockPool
from saccade.methods.base import Method
from saccade.methods.policy import Policy
from saccade.selection import Dense

BLOCK_BYTES = BlockPool.block_bytes(2, 12, 32, torch.float32)
LAYERS = 3
FIVE = (  # each sparse at 200 tokens
    "dense",
    "topk(k=24)",
    "streaming(sinks=2, window=40)",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1)",
)
EVERY = [Policy.parse(case.methods()[0]) for case in MATRIX]  # one of every registered method
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def make(folder, blocks: int = 400, **options: Any) -> LLM:
    return LLM(
        folder, dtype="float32", kv_memory=blocks * BLOCK_BYTES, prefill_chunk=options.pop("chunk", 64), **options
    )


def tokens(output) -> list[int]:
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def llm(tiny_llama) -> Iterator[LLM]:
    engine = make(tiny_llama)
    yield engine
    assert engine.engine.pool.used_blocks == 0
    assert not engine.engine.busy


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_ids(length, seed=length) for length in (230, 300, 129, 257, 333)]


@pytest.fixture(scope="module")
def solo(llm, prompts) -> list[list[int]]:
    """Each policy's greedy tokens for its own prompt, run alone."""
    return [tokens(llm.generate(ids, GREEDY, policy=policy)[0]) for ids, policy in zip(prompts, FIVE)]


def test_solo_runs_differ_between_policies(llm, prompts):
    """Without this, equality below would prove nothing about policies."""
    answers = [tokens(llm.generate(prompts[1], GREEDY, policy=policy)[0]) for policy in FIVE]
    assert len({tuple(answer) for answer in answers}) >= 4


def test_dense_greedy_equals_transformers(llm, prompts, tiny_llama):
    theirs = oracle(tiny_llama)
    for ids in prompts[:2]:
        assert tokens(llm.generate(ids, SamplingParams(temperature=0, max_tokens=10))[0]) == oracle_greedy(
            theirs, ids, 10
        )


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (3, 3, 1, 4, 0)])
def test_i3_i4_a_mixed_batch_equals_solo_runs(llm, prompts, solo, order):
    outputs = llm.generate([prompts[i] for i in order], GREEDY, policy=[FIVE[i] for i in order])
    assert [tokens(output) for output in outputs] == [solo[i] for i in order]
    assert [output.prompt_token_ids for output in outputs] == [prompts[i] for i in order]


def test_a_batch_of_every_method_equals_solo_runs(llm, prompts):
    ids = [prompts[i % len(prompts)] for i in range(len(EVERY))]
    alone = [tokens(llm.generate(one, GREEDY, policy=policy)[0]) for one, policy in zip(ids, EVERY)]
    assert [tokens(output) for output in llm.generate(ids, GREEDY, policy=EVERY)] == alone
    assert [tokens(output) for output in llm.generate(ids[::-1], GREEDY, policy=EVERY[::-1])] == alone[::-1]


def test_requests_that_come_and_go_do_not_disturb(llm, prompts, solo):
    """Different lengths of answers and a limit on running requests: the batch changes at every step."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 10, 3, 7, 2)]
    llm.engine.scheduler.max_requests = 2
    try:
        outputs = llm.generate(prompts, params, policy=list(FIVE))
    finally:
        llm.engine.scheduler.max_requests = 64
    assert [tokens(output) for output in outputs] == [want[: p.max_tokens] for want, p in zip(solo, params)]


@pytest.mark.parametrize("chunk", [1, 7, 32, 100, 2048])
def test_chunked_prefill_equals_whole_prefill_in_dense(tiny_llama, prompts, solo, chunk):
    ids = prompts[0] if chunk > 1 else prompts[0][:40]
    whole = solo[0] if chunk > 1 else tokens(make(tiny_llama).generate(ids, GREEDY)[0])
    assert tokens(make(tiny_llama, chunk=chunk).generate(ids, GREEDY)[0]) == whole


@pytest.mark.parametrize("policy", [*EVERY, FIVE[4]], ids=str)
def test_preemption_changes_no_token(tiny_llama, llm, policy):
    """Three requests grow in a pool that holds little more than two: the last ones are computed again, and agree."""
    ids = [random_ids(length, seed=length) for length in (127, 125, 126)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [tokens(llm.generate(one, params, policy=policy)[0]) for one in ids]
    small = make(tiny_llama, blocks=3 * LAYERS * 4 + LAYERS)
    outputs = small.generate(ids, params, policy=policy)
    assert [tokens(output) for output in outputs] == alone
    assert sum(output.report["preemptions"] for output in outputs) > 0
    assert outputs[0].report["preemptions"] == 0
    assert small.engine.pool.used_blocks == 0


def test_preemption_keeps_the_draws_of_a_sampled_request(tiny_llama, llm):
    ids = [random_ids(length, seed=length) for length in (127, 125, 126)]
    params = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, logprobs=1) for seed in range(3)]
    alone = [llm.generate(one, each)[0].outputs[0] for one, each in zip(ids, params)]
    outputs = make(tiny_llama, blocks=3 * LAYERS * 4 + LAYERS).generate(ids, params)
    assert sum(output.report["preemptions"] for output in outputs) > 0
    for output, want in zip(outputs, alone):
        assert tokens(output) == want.token_ids
        assert output.outputs[0].text == want.text
        assert output.outputs[0].cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)


def test_a_full_pool_ends_the_last_request_with_what_it_has(tiny_llama, llm):
    small = make(tiny_llama, blocks=4 * LAYERS)
    ids = random_ids(120, seed=1)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    output = small.generate(ids, params)[0]
    assert output.outputs[0].finish_reason == "length"
    assert tokens(output) == tokens(llm.generate(ids, params)[0])[: len(tokens(output))]
    assert 8 <= len(tokens(output)) <= 9
    assert any("KV pool is full" in note for note in output.report["notes"])
    assert small.engine.pool.used_blocks == 0


# --- cancellation and failure


def start(llm: LLM, ids: list[int], params: SamplingParams = GREEDY, policy: str | Policy = "dense"):
    return llm.engine.add(ids, params, Policy.parse(policy))


def finish(engine: Engine) -> None:
    for _ in range(500):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 9])
def test_cancelling_frees_blocks_and_leaves_others_unchanged(llm, prompts, solo, steps):
    """While queued, in the middle of a prefill of 6 chunks, and while decoding."""
    kept = [start(llm, prompts[i], policy=FIVE[i]) for i in (0, 1)]
    gone = start(llm, prompts[4], policy=FIVE[4])
    last = start(llm, prompts[2], policy=FIVE[2])
    for _ in range(steps):
        llm.engine.step()
    before = llm.engine.pool.used_blocks
    held = gone.sequence.kv.blocks
    llm.engine.cancel(gone)
    assert gone.finish_reason == "cancelled"
    assert llm.engine.pool.used_blocks == before - held
    llm.engine.cancel(gone)  # once more does nothing
    finish(llm.engine)
    assert [request.final_ids for request in (*kept, last)] == [solo[0], solo[1], solo[2]]
    assert llm.engine.pool.used_blocks == 0


def test_closing_a_stream_early_cancels(llm, prompts):
    for stop_after in (1, 8):
        stream = llm.stream(prompts[4], GREEDY)
        for _ in range(stop_after):
            next(stream)
        assert llm.engine.pool.used_blocks > 0
        stream.close()
        assert llm.engine.pool.used_blocks == 0
        assert not llm.engine.busy
    llm.stream(prompts[0], GREEDY).close()  # never started
    assert not llm.engine.busy


@dataclass(frozen=True)
class Broken(Method):
    """Fails at one layer of one phase."""

    name: ClassVar[str] = "broken"
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    phase: str = "decode"
    layer: int = 1

    def _select(self, phase, chunk):
        if phase == self.phase and chunk.layer == self.layer:
            raise RuntimeError("planted failure")
        return Dense(chunk.shape)

    def select_prefill(self, chunk):
        return self._select("prefill", chunk)

    def select_decode(self, query, state):
        return self._select("decode", query)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("layer", [0, 2])
def test_one_request_that_fails_takes_nobody_down(llm, prompts, solo, phase, layer):
    broken = Policy(Broken(phase, layer), Broken(phase, layer))
    with pytest.warns(RuntimeWarning, match="planted failure"):
        outputs = llm.generate([prompts[0], prompts[3], prompts[2]], GREEDY, policy=[FIVE[0], broken, FIVE[2]])
    assert [tokens(outputs[0]), tokens(outputs[2])] == [solo[0], solo[2]]
    assert outputs[1].outputs[0].finish_reason == "error"
    assert f"layer {layer}, {phase}: RuntimeError: planted failure" in outputs[1].error
    assert len(tokens(outputs[1])) == (0 if phase == "prefill" else 1)
    assert outputs[0].error is None
    assert llm.engine.pool.used_blocks == 0
    assert tokens(llm.generate(prompts[1], GREEDY, policy=FIVE[1])[0]) == solo[1]


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt."""


@pytest.fixture
def interrupting(llm, monkeypatch):
    """Makes the engine fail in the middle of its next pass, after two layers have stored their keys."""
    from saccade.engine import executor

    real = executor._BatchContext.attend

    def arm() -> None:
        def attend(self, layer, *rest):
            out = real(self, layer, *rest)
            if layer == 1:
                monkeypatch.setattr(executor._BatchContext, "attend", real)
                raise Interrupted
            return out

        monkeypatch.setattr(executor._BatchContext, "attend", attend)

    return arm


@pytest.mark.parametrize("steps", [2, 6])
def test_an_interrupt_in_the_middle_of_a_pass_leaves_others_intact(llm, prompts, solo, interrupting, steps):
    """generate() gives up, but a stream that shared its step goes on as if nothing had happened."""
    stream = llm.stream(prompts[1], GREEDY, policy=FIVE[1])
    got = [token for _ in range(steps) for token in next(stream).new_tokens]
    interrupting()
    with pytest.raises(Interrupted):
        llm.generate(prompts[0], GREEDY)
    got += [token for output in stream for token in output.new_tokens]
    assert got == solo[1]
    assert llm.engine.pool.used_blocks == 0


def test_an_interrupted_session_turn_is_cancelled(llm, prompts, interrupting):
    with llm.session() as session:
        first = session.generate(prompts[2], GREEDY)
        before = session.token_ids
        interrupting()
        with pytest.raises(Interrupted):
            session.generate(prompts[3][:50], GREEDY)
        assert not llm.engine.busy
        assert session.token_ids == before
        again = tokens(session.generate(prompts[3][:50], GREEDY))
    fresh = llm.generate([*prompts[2], *tokens(first), *prompts[3][:50]], GREEDY)[0]
    assert again == tokens(fresh)


def test_interleaved_streams_lose_nothing(llm, prompts, solo):
    """Whoever drives a step runs everybody's rows; each reader must still see all of its own tokens and text."""
    streams = [llm.stream(ids, GREEDY, policy=policy) for ids, policy in zip(prompts[:3], FIVE)]
    got: list[list] = [[] for _ in streams]
    live = dict(enumerate(streams))
    while live:
        for i, stream in list(live.items()):
            output = next(stream, None)
            if output is None:
                del live[i]
            else:
                got[i].append(output)
    for outputs, want in zip(got, solo):
        assert [token for output in outputs for token in output.new_tokens] == want
        assert "".join(output.new_text for output in outputs) == outputs[-1].request.text
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


# --- state of methods


@dataclass(frozen=True)
class Recorder(Method):
    """Reads everything and writes down what the engine tells it. Its state counts the steps it has seen."""

    name: ClassVar[str] = "recorder"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    tail_rows: ClassVar[int] = 70
    log: list = field(default_factory=list, compare=False)

    def begin(self, segment):
        entry = {"begin": segment.kv.length, "tail": segment.q[0, :, 0].tolist(), "layer": segment.layer, "steps": 0}
        self.log.append(entry)
        return entry

    def select_decode(self, query, state):
        assert state["layer"] == query.layer
        assert state["steps"] == query.step == query.kv.length - state["begin"] - 1
        assert state["begin"] + state["steps"] < query.kv.length
        return Dense(query.shape)

    def observe(self, query, selection, weights, state):
        assert selection.shape == query.shape
        state["steps"] += 1


def test_state_begins_with_the_tail_of_the_prefill_whatever_the_chunks(tiny_llama, prompts):
    logs = []
    for chunk in (2048, 64, 50):
        recorder = Recorder()
        llm = make(tiny_llama, chunk=chunk)
        with llm.session(Policy(decode=recorder)) as session:
            session.generate(prompts[0], GREEDY)
            session.generate(
                prompts[1][:30], GREEDY
            )  # fewer rows than the tail wants, one of them from the turn before
        assert [entry["layer"] for entry in recorder.log] == [0, 1, 2] * 2
        assert [entry["begin"] for entry in recorder.log] == [230] * 3 + [230 + 10 + 30] * 3
        assert [len(entry["tail"]) for entry in recorder.log] == [70] * 3 + [31] * 3
        assert all(entry["steps"] == 9 for entry in recorder.log)
        logs.append(recorder.log)
    for other in logs[1:]:
        for a, b in zip(logs[0], other):
            assert a["tail"] == pytest.approx(b["tail"], abs=1e-4)


def test_state_is_built_again_after_preemption(tiny_llama):
    ids = [random_ids(length, seed=length) for length in (127, 125, 126)]
    recorders = [Recorder() for _ in ids]
    small = make(tiny_llama, blocks=3 * LAYERS * 4 + LAYERS)
    outputs = small.generate(ids, GREEDY, policy=[Policy(decode=recorder) for recorder in recorders])
    for output, recorder in zip(outputs, recorders):
        assert len(recorder.log) == LAYERS * (1 + output.report["preemptions"])
        assert all(entry["steps"] == 9 for entry in recorder.log[-LAYERS:])
    assert any(output.report["preemptions"] for output in outputs)


# --- who waits for whom


def test_a_waiting_session_gives_up_its_keys_rather_than_block_the_queue(tiny_llama, llm):
    """Two idle sessions and one slot: the first in the queue needs more than is free, the second holds it."""
    small = make(tiny_llama, blocks=8 * LAYERS, max_requests=1)
    a, b = small.session(), small.session()
    ids_a, ids_b = random_ids(60, seed=1), random_ids(120, seed=2)
    b.generate(ids_b, GREEDY)
    runner = small.stream(random_ids(40, seed=3), GREEDY)
    next(runner)
    engine = small.engine
    first = engine.add(random_ids(150, seed=4), GREEDY, Policy(), a.sequence)
    second = engine.add(ids_a, GREEDY, Policy(), b.sequence)
    for _ in range(200):
        if first.finished and second.finished:
            break
        engine.step()
    assert first.finish_reason == second.finish_reason == "length"
    fresh = llm.generate([*b.token_ids[: -len(second.final_ids)]], GREEDY)[0]
    assert second.final_ids == tokens(fresh)
    runner.close()
    a.close(), b.close()
    assert engine.pool.used_blocks == 0


def test_a_waiting_session_gives_up_its_keys_rather_than_starve_a_running_request(tiny_llama, llm):
    small = make(tiny_llama, blocks=8 * LAYERS, max_requests=1)
    session = small.session()
    session.generate(random_ids(90, seed=1), GREEDY)  # 4 blocks a layer
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ids = random_ids(120, seed=2)
    running = small.engine.add(ids, params, Policy())
    small.engine.step()
    waiting = small.engine.add(random_ids(20, seed=3), GREEDY, Policy(), session.sequence)
    finish(small.engine)
    assert running.final_ids == tokens(llm.generate(ids, params)[0])
    assert running.report.notes == []
    context = session.token_ids[: -len(waiting.final_ids)]
    assert waiting.final_ids == tokens(llm.generate(context, GREEDY)[0])
    session.close()


def test_a_session_runs_one_turn_at_a_time(llm, prompts):
    from saccade.errors import RequestError

    session = llm.session()
    stream = session.stream(prompts[0], GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="turn"):
        session.generate(prompts[1], GREEDY)
    with pytest.raises(RequestError, match="turn"):
        session.chat("hello", GREEDY)
    got = [token for output in stream for token in output.new_tokens]
    assert session.token_ids == [*prompts[0], *got]
    stream = session.stream(prompts[1], GREEDY)
    next(stream)
    session.close()  # cancels what runs
    assert session.token_ids == []
    assert not llm.engine.busy
    assert next(stream, None) is None


@pytest.mark.parametrize("policy", FIVE)
def test_exact_mode_gives_the_same_logprobs_to_the_last_bit(tiny_llama, prompts, policy):
    exact = make(tiny_llama, exact=True)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    alone = exact.generate(prompts[0], params, policy=policy)[0].outputs[0]
    beside = exact.generate(prompts[:3], params, policy=[policy, FIVE[1], FIVE[2]])[0].outputs[0]
    assert beside.logprobs == alone.logprobs


def test_a_failure_in_choosing_a_token_takes_nobody_down(llm, prompts, solo, monkeypatch):
    good, bad = start(llm, prompts[0]), start(llm, prompts[2])
    monkeypatch.setattr(bad.sampler, "sample", lambda ids, logits: [][0])
    finish(llm.engine)
    assert good.final_ids == solo[0]
    assert (bad.finish_reason, bad.final_ids) == ("error", [])
    assert "IndexError" in bad.error
    assert llm.engine.pool.used_blocks == 0
