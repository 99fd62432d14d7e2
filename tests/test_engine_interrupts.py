"""An interrupt may come between any two lines: whatever was asked for ends, and nothing is left behind."""

from __future__ import annotations

import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from engine_helpers import make
from tiny_models import (
    one_thread,  # noqa: F401
    random_ids,
)

from saccade import SamplingParams
from saccade.cli.streaming import _interrupts
from saccade.engine import loop, stream
from saccade.engine.watch.pulse import Pulse
from saccade.errors import SaccadeError

ENDLESS = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
FILES = {module.__file__ for module in (loop, stream)} | {
    loop.__file__.replace("engine/loop", name) for name in ("llm", "session", "outputs")
}
CLEANING = {"end", "cancel", "__exit__"}  # one interrupt is survived, not a second one while the first is dealt with


def _releases(frame) -> bool:
    """Whether a ``with`` may be about to end: no real signal comes between its last line and what it ends with."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with self.")


def interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Run ``call`` and interrupt it before its line ``number``, counted as they run; False if it has no so many."""
    lines = 0

    def line(frame, event, arg):
        nonlocal lines
        if event == "line" and not _releases(frame):
            lines += 1
            if lines == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return line

    def tracer(frame, event, arg):
        code = frame.f_code
        return line if code.co_filename in FILES and code.co_name not in CLEANING else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a stream that is left by one
def test_an_interrupt_between_any_two_lines_ends_what_was_asked(tiny_llama, prompts):
    """Between AsyncEngine.add and the first read of a stream it left requests running to their end."""
    llm = make(tiny_llama)
    short = SamplingParams(temperature=0, max_tokens=1)
    session = llm.session()
    begun = llm.engine.sessions[session.id]
    ways: dict[str, Callable[[], object]] = {
        "generate": lambda: llm.generate([prompts[0][:40]] * 2, ENDLESS),
        "stream": lambda: next(llm.stream(prompts[0][:40], ENDLESS)),
        "session": lambda: session.generate(prompts[0][:40], ENDLESS),
        "chat": lambda: next(session.stream_chat("hello", ENDLESS)),
    }
    for way, call in ways.items():
        number = 0
        while interrupted_at(number := number + 1, call) and number < 110:  # in the end it waits for the answer
            deadline = time.monotonic() + 60
            while llm.engine.busy and time.monotonic() < deadline:
                time.sleep(0.001)
            assert time.monotonic() < deadline, f"{way}, line {number}: a request runs on"
            assert begun.tokens == []
            assert llm.pool.used_blocks == 0
        assert number > 25, way
    assert llm.generate(prompts[0], short)[0].error is None
    llm.close()


FORKED = """
import os, sys, torch
from saccade import LLM, SamplingParams
from saccade.errors import SaccadeError
torch.set_num_threads(2)
few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
more = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
make = lambda: LLM(sys.argv[1], dtype="float32", kv_memory="16MiB", threads=2)
llm = make()
session = llm.session()
ids = list(range(200))
want = llm.generate(ids, few)[0].outputs[0].token_ids
torch.randn(600, 600).matmul(torch.randn(600, 600)).exp()  # by threads that a fork leaves behind
stream = llm.stream(ids, more)
got = next(stream).new_tokens
pid = os.fork()
if pid == 0:
    calls = [lambda: llm.generate(ids, few), lambda: next(llm.stream(ids, few)), lambda: session.generate(ids, few),
             lambda: list(stream)]
    for call in calls:
        try:
            call()
        except SaccadeError as error:
            assert "forked" in str(error) and "make a new LLM" in str(error), error
        else:
            os._exit(3)
    session.close()
    llm.close()
    own = make()
    same = own.generate(ids, few)[0].outputs[0].token_ids == want
    own.close()
    os._exit(0 if same else 4)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
for output in stream:
    got += output.new_tokens
print(code, len(got), llm.generate(ids, few)[0].outputs[0].token_ids == want)
"""


def test_a_forked_process_is_told_to_make_its_own(tiny_llama):
    """Its calls waited for ever for a thread that had stayed behind; torch's own threads made it crash."""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tiny_llama)], capture_output=True, text=True, timeout=120, env=env
    )
    assert (done.returncode, done.stdout) == (0, "0 40 True\n"), done.stderr


def test_a_closed_engine_says_so(tiny_llama, prompts):
    llm = make(tiny_llama)
    llm.close()
    with pytest.raises(SaccadeError, match="this engine is closed; make a new LLM"):
        llm.generate(prompts[0], ENDLESS)


@pytest.mark.filterwarnings("ignore:a request failed")
@pytest.mark.parametrize("end", ["close", "close_soon"])
def test_an_engine_ends_between_two_layers_of_a_chunk(tiny_llama, monkeypatch, end):
    """A chunk of a long prompt takes minutes on a small machine: neither close() nor the interpreter's end waits so."""
    begun, layers, told = threading.Event(), [], []
    layer = Pulse.layer

    def held(pulse):
        begun.set()
        until = time.monotonic() + 60
        while not pulse.over and time.monotonic() < until:
            time.sleep(0.01)
        layers.append(pulse.over)
        layer(pulse)

    llm = make(tiny_llama)
    pool = llm.pool
    monkeypatch.setattr(Pulse, "layer", held)

    def ask():
        try:
            told.append(llm.generate(random_ids(60, seed=1), SamplingParams(temperature=0, max_tokens=4)))
        except SaccadeError as error:
            told.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(60)
    getattr(llm.loop, end)()
    asking.join(60)
    llm.loop.close()
    assert layers == [True], "the first layer's beginning was its end"
    assert "this engine was closed" in str(told)
    assert pool.used_blocks == 0
    llm.close()


def test_without_a_way_to_stop_an_answer_ctrl_c_ends_the_engine():
    ended = []
    with pytest.raises(KeyboardInterrupt), _interrupts(None, lambda: ended.append(True)):
        signal.raise_signal(signal.SIGINT)
    assert ended == [True]
