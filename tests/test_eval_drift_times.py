"""What a drift says of time: not what compilers of kernels took, nor recordings of steps."""

from __future__ import annotations

import time

import pytest

from saccade.engine.core import Engine
from saccade.engine.settings.config import EngineConfig
from saccade.engine.worker import Worker
from saccade.eval.board.drifts import Drifts
from saccade.eval.drift.measure import _records, run
from saccade.eval.setting import load
from saccade.methods.policy import Policy
from saccade.ops import compiling
from saccade.passage import made_passage

WAIT = 2.0  # seconds


@pytest.fixture
def llm(tiny_llama):
    config = EngineConfig(
        str(tiny_llama), dtype="float32", kv_memory="64MiB", prefill_chunk=64, enable_prefix_caching=True
    )
    with load(config) as made:
        yield made


@pytest.fixture
def compiler(monkeypatch):
    """The first step of each phase that is in ``waits`` waits for a compiler; ``asked``: the policies of requests."""
    waits, asked, real, receive = set(), [], Worker.run, Engine.receive
    monkeypatch.setattr(compiling.compiled, "kernels", 0)
    monkeypatch.setattr(compiling.compiled, "seconds", 0.0)

    def waiting(self, step, *args, **options):
        for one in step.scheduled:
            if one.phase in waits:
                waits.remove(one.phase)
                time.sleep(WAIT)
                compiling._listen(times=type("T", (), {"total": WAIT * 1e6}), cache_hit=False)
        return real(self, step, *args, **options)

    def received(self, message, *args):
        asked.append(message.policy.text)
        return receive(self, message, *args)

    monkeypatch.setattr(Worker, "run", waiting)
    monkeypatch.setattr(Engine, "receive", received)
    return waits, asked


@pytest.mark.parametrize("text", ["dense", "quest(budget=128, dense_layers=0)", "prefill=streaming(window=48)"])
def test_seconds_are_of_a_run_that_waited_for_no_compiler(llm, compiler, text):
    waits, asked = compiler
    passage, policy = made_passage(llm.encode, 640, 8, 0), Policy.parse(text)
    waits |= {"prefill", "decode"}
    first, told = run(llm, passage, policy, weights=False)
    assert not waits
    assert 0 < told["prefill"]["seconds"] < WAIT
    assert 0 < told["decode"]["seconds"] < WAIT
    assert any("it waited 4.0 s while 2 kernels were compiled" in note for note in told["notes"])
    assert len(asked) == 2
    llm.reset_prefix_cache()
    again, later = run(llm, passage, policy, weights=False)
    assert len(asked) == 3  # nothing was compiled: once is enough
    assert first.equal(again)
    for phase in ("prefill", "decode"):
        for name in ("density", "reads", "estimated"):
            assert told[phase][name] == later[phase][name]


def test_what_was_computed_before_is_not_computed_again(llm, compiler):
    """A prefill that another policy's run left stays, and only decode is timed again."""
    waits, asked = compiler
    passage = made_passage(llm.encode, 640, 8, 0)
    run(llm, passage, Policy(), weights=False)
    kept = llm.engine.prefixes.kept_slots
    waits.add("decode")
    _, told = run(llm, passage, Policy.parse("quest(budget=128, dense_layers=0)"), weights=False)
    assert told["decode"]["seconds"] < WAIT
    assert len(asked) == 3
    assert llm.engine.prefixes.kept_slots >= kept > 0
    waits.add("decode")
    _, told = run(llm, passage, Policy.parse("streaming(window=64)"), weights=True)
    assert told["decode"]["seconds"] >= WAIT  # true weights are computed meanwhile: no time that anything is judged by
    assert len(asked) == 4


def test_a_boards_times_leave_the_compiler_out(llm, compiler, tmp_path):
    waits, _ = compiler
    waits |= {"prefill", "decode"}
    drifts = Drifts(llm, llm.engine.config, tmp_path, 640, 8)
    one = drifts.of(Policy.parse("streaming(window=64)"))
    assert one.record["dense_seconds"]["prefill"] < WAIT > one.record["dense_seconds"]["decode"]
    assert one.record["decode"]["seconds"] < WAIT


def test_which_runs_recorded_steps():
    assert not _records(None, None)
    assert not _records((3, 64), (3, 64))
    assert _records((3, 64), (4, 64))
    assert _records((64, 64), (64, 64))  # one may have taken another's place
