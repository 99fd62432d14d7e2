"""State of methods follows a request, and sessions that wait make room."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from engine_helpers import EVERY, GREEDY, LAYERS, finish, make, start, tokens
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.worker import Worker
from saccade.methods.base import Method
from saccade.methods.policy import Policy
from saccade.selection import Dense


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


def test_a_waiting_session_gives_up_its_keys_rather_than_block_the_queue(tiny_llama, llm):
    """Two idle sessions and one slot: the first in the queue needs more than is free, the second holds it."""
    small = make(tiny_llama, blocks=8 * LAYERS, max_requests=1)
    a, b = small.session(), small.session()
    ids_a, ids_b = random_ids(60, seed=1), random_ids(120, seed=2)
    b.generate(ids_b, GREEDY)
    engine = small.engine
    start(small, random_ids(40, seed=3))
    engine.step()
    first = engine.add(random_ids(150, seed=4), GREEDY, Policy(), a.sequence)
    second = engine.add(ids_a, GREEDY, Policy(), b.sequence)
    for _ in range(200):
        if first.finished and second.finished:
            break
        engine.step()
    assert first.finish_reason == second.finish_reason == "length"
    fresh = llm.generate([*b.token_ids[: -len(second.final_ids)]], GREEDY)[0]
    assert second.final_ids == tokens(fresh)
    finish(engine)
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
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    stream = session.stream(prompts[0], long)
    first = next(stream)
    with pytest.raises(RequestError, match="turn"):
        session.generate(prompts[1], GREEDY)
    with pytest.raises(RequestError, match="turn"):
        session.chat("hello", GREEDY)
    got = first.new_tokens + [token for output in stream for token in output.new_tokens]
    assert session.token_ids == [*prompts[0], *got]
    stream = session.stream(prompts[1], long)
    next(stream)
    session.close()  # cancels what runs
    assert session.token_ids == []
    assert not llm.engine.busy
    assert [output.outcome.finish_reason for output in stream] == ["cancelled"]


def _tensors(part: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif depth and isinstance(part, (list, tuple)):
        for one in part:
            yield from _tensors(one, depth - 1)
    elif depth and hasattr(part, "__dict__"):
        yield from _tensors([*vars(part).values()], depth - 1)


@pytest.mark.parametrize("end", ["answered", "failed", "cancelled", "closed"])
def test_what_a_method_knew_is_freed_with_its_request(llm, prompts, monkeypatch, end):
    """At once, and not when the garbage is collected: a server's next request needs the memory."""
    real, seen = Worker.run, {}
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def run(self, step):
        result = real(self, step)
        for memory in self.memories.values():
            for tensor in _tensors([memory.states, memory.tails, memory.watched, memory.gone]):
                seen[id(tensor)] = weakref.ref(tensor)
        if end == "failed" and step.scheduled[0].phase == "decode":
            raise RuntimeError("planted")
        return result

    monkeypatch.setattr(Worker, "run", run)
    knew = 0
    gc.disable()
    try:
        for policy in EVERY:
            if end == "closed":
                with llm.session(policy) as session:
                    session.generate(prompts[2][:80], few)
                    assert llm.pool.used_blocks
            elif end == "cancelled":
                request = start(llm, prompts[2][:80], few, policy)
                for _ in range(3):
                    llm.engine.step()
                llm.engine.cancel(request)
                del request
            else:
                request = start(llm, prompts[2][:80], few, policy)
                finish(llm.engine)
                assert (request.error is not None) == (end == "failed"), (policy.text, request.error)
                del request  # its report holds the counts of kernels, and by them the last row's state
            knew += bool(seen)
            left = [one() for one in seen.values() if one() is not None]
            assert not left, f"{policy.text}: {len(left)} tensors"
            seen.clear()
    finally:
        gc.enable()
    assert knew >= 8
