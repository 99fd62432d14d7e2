"""An engine that hangs: who is told, and how the server goes on, ends, or starts another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fork_server
import httpx
import pytest
from engine_helpers import BLOCK_BYTES, make
from server_helpers import GREEDY, error, parsed, serving, until
from tiny_models import random_ids

from saccade.engine.settings.config import EngineConfig
from saccade.engine.watch.pulse import Pulse
from saccade.server import engine_launch
from saccade.server.engine_client import EngineProcess
from saccade.server.engine_watch import MOST_STARTS, PATIENCE, WINDOW, EngineWatch, Starts, processor_seconds
from saccade.server.warming import settle

LIMIT = 0.5
LONG = {**GREEDY, "max_tokens": 1500}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(watch: EngineWatch, clock: Clock, seconds: float, quiet=None, processor=None) -> list[str | None]:
    """What looks say while signs of life come, or do not (``quiet`` None). Both are of the time since the call."""
    said, began = [], clock.now
    while clock.now < began + seconds:
        clock.now += watch.every
        if quiet is not None:
            watch.heard(quiet(clock.now - began), None if processor is None else processor(clock.now - began))
        said.append(watch.look())
    return said


def test_what_works_does_not_hang_and_what_neither_works_nor_gets_on_does():
    clock = Clock()
    watch = EngineWatch(10.0, clock=clock)
    assert not any(told(watch, clock, 500, quiet=lambda _: 0.0)), "nothing to do"
    assert not any(told(watch, clock, 500, quiet=lambda s: s % 9)), "layer after layer"
    # a layer of a minute on a slow machine, a kernel that is compiled
    assert not any(told(watch, clock, 10 * PATIENCE - 1, quiet=lambda s: s, processor=lambda s: s))
    assert told(watch, clock, 2, quiet=lambda s: s + 10 * PATIENCE, processor=lambda s: s)[-1], (
        "but no step lasts for ever"
    )
    watch.begin()
    said = told(watch, clock, 15, quiet=lambda s: s, processor=lambda _: 3.0)
    assert [bool(one) for one in said] == [second > 10 for second in range(1, 16)]
    assert "has not got on for 1" in said[-1]
    assert not any(told(watch, clock, 3, quiet=lambda _: 0.0)), "it gets on again"


def used(clock: Clock, rate: float | None) -> float | None:
    """Processor seconds."""
    return None if rate is None else rate * clock.now


def test_a_process_that_is_silent_hangs_unless_it_uses_a_processor():
    for rate, hangs in ((None, True), (0.0, True), (1.0, False)):
        clock = Clock()
        watch = EngineWatch(2.0, partial(used, clock, rate), clock)
        said = told(watch, clock, 4)
        assert bool(said[-1]) == hangs
        assert not any(said[:3])
    assert "no sign of life" in told(EngineWatch(2.0, clock=clock), clock, 4)[-1]


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system tells no waiting")
@pytest.mark.parametrize("whose", ["thread", "process"])
def test_waiting_for_a_processor_that_others_have_is_no_hanging(whose):
    """On a busy machine an engine at work may get less of a processor than one that hangs may use."""
    processors, threads = os.sched_getaffinity(0), threading.active_count()
    one = {min(processors)}
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    pulse = Pulse()
    pulse.beat()
    used = (lambda: pulse.processor) if whose == "thread" else partial(processor_seconds, os.getpid())
    try:
        for pid in (0, *(hog.pid for hog in hogs)):
            os.sched_setaffinity(pid, one)
        began, before, own = time.perf_counter(), used(), time.thread_time()
        while time.perf_counter() < began + 2:
            pass
        wall, own = time.perf_counter() - began, time.thread_time() - own
        after = used()
        assert own < 0.6 * wall, "others had it meanwhile"
        assert 0.9 * wall < after - before < (1.2 + threads) * wall
    finally:
        os.sched_setaffinity(0, processors)
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_what_auto_timed_before_the_first_request_leaves_no_step_that_seems_to_hang(tiny_llama, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("saccade.engine.settings.pays.LENGTHS", (16, 32))
    monkeypatch.setattr("saccade.engine.settings.pays.PROBE", 8)
    with make(tiny_llama, policy="auto") as llm:
        beats = llm.engine.watch.pulse.beats
        settle(llm)
        assert llm.engine.watch.pulse.beats > beats, "it was timed"
        time.sleep(0.05)
        assert (llm.engine.watch.pulse.quiet, llm.engine.watch.pulse.processor) == (0.0, None)


def test_a_watch_that_was_held_up_itself_accuses_nobody():
    clock = Clock()
    watch = EngineWatch(2.0, clock=clock)
    clock.now += 60
    assert watch.look() is None  # signs of life wait to be read
    watch.heard(0.0, None)
    assert not any(told(watch, clock, 1, quiet=lambda _: 0.0))


def test_a_lost_engine_is_started_anew_ever_later_and_not_for_ever():
    clock = Clock()
    starts = Starts(clock)
    assert [starts.next() for _ in range(MOST_STARTS + 1)] == [0.0, 1.0, 2.0, 4.0, 8.0, None]
    clock.now += WINDOW
    assert starts.next() == 0.0


@pytest.fixture(scope="module")
def hang(tmp_path_factory) -> Iterator[Path]:
    """Engines hang while this file exists."""
    file, program = tmp_path_factory.mktemp("hang") / "how", Path(__file__).with_name("stuck_engine.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STUCK_ENGINE", str(file))
        patch.setattr(engine_launch, "PROGRAM", (sys.executable, str(program)))
        patch.setattr(engine_launch, "subprocess", fork_server.SUBPROCESS)
        yield file


def started(folder, restart=False, **settings) -> EngineProcess:
    config = EngineConfig.of(
        model=folder, dtype="float32", kv_memory=400 * BLOCK_BYTES, prefill_chunk=64, max_requests=4, **settings
    )
    return EngineProcess(config, "error", None, LIMIT, restart)


@pytest.fixture(scope="module")
def server(tiny_llama, hang):
    with serving(started(tiny_llama), drain_seconds=1.0) as running:
        yield running


def health(server) -> str:
    answer = server.client.get("/health")
    assert (answer.status_code == 200) == (answer.json()["status"] == "ok")
    return answer.json()["status"]


class Stream(threading.Thread):
    """A client whose stream has begun. It asks again where a busy machine held the engine up for more than LIMIT."""

    def __init__(self, server, **fields) -> None:
        super().__init__(daemon=True)
        self.url, self.body = server.url, {"prompt": "x", **LONG, "stream": True, **fields}
        self.begun, self.events = threading.Event(), []
        self.start()
        assert self.begun.wait(60)

    def run(self) -> None:
        ends = time.monotonic() + 60
        while not self.begun.is_set() and time.monotonic() < ends:
            self.ask()
            time.sleep(0.05)

    def ask(self) -> None:
        with httpx.stream("POST", self.url + "/v1/completions", json=self.body, timeout=60) as response:
            if response.status_code == 503:
                return
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            self.begun.set()
            self.events = parsed(iter([first, *lines]))

    def failure(self) -> dict:
        self.join(60)
        assert self.events[-1] == "[DONE]"
        return self.events[-2]["error"]


def test_a_stopped_process_is_seen_and_told_and_may_go_on(server):
    stream, engine = Stream(server), server.serving.engine
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        assert stream.failure()["code"] == "engine_stuck"
        assert "no sign of life" in stream.failure()["message"]
        assert health(server) == "stuck"
        assert server.client.get("/ready").json() == {"status": "stuck"}
        refused = server.complete("x")
        assert error(refused)[:2] == (503, "engine_stuck")
        assert int(refused.headers["retry-after"]) >= 1
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)
    until(lambda: health(server) == "ok")
    assert server.complete("x").status_code == 200
    server.idle()  # what was running when it hung was cancelled
    assert server.serving.engine.statistics().used_blocks == 0


def test_a_step_that_hangs_is_seen_and_told_to_those_who_wait_as_well(server, hang):
    streams = [Stream(server) for _ in range(2)]
    hang.write_text("sleep")
    waiting = server.complete("y", policy="quest", session_id="s")
    assert error(waiting)[:2] == (503, "engine_stuck")
    assert "has not got on" in waiting.json()["error"]["message"]
    assert {stream.failure()["code"] for stream in streams} == {"engine_stuck"}
    assert health(server) == "stuck"
    hang.unlink()
    until(lambda: health(server) == "ok")
    assert server.complete("x", session_id="s").status_code == 200


def test_a_long_step_at_work_is_no_hanging_one(server, hang):
    stream = Stream(server, max_tokens=60)
    hang.write_text("spin")
    ends = time.monotonic() + 3 * LIMIT
    while time.monotonic() < ends:
        assert health(server) == "ok"
        time.sleep(0.05)
    hang.unlink()
    stream.join(30)
    assert stream.events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.fixture
def unseen(server, monkeypatch):
    """The engine is not known to hang."""
    monkeypatch.setattr(server.serving.engine._watch, "limit", 60.0)


def test_a_deadline_is_kept_though_the_engine_hangs(server, hang, unseen):
    stream = Stream(server, deadline_seconds=1.0)
    hang.write_text("sleep")
    assert stream.failure()["code"] == "deadline_exceeded"
    hang.unlink()
    server.idle()
    assert server.complete("x").status_code == 200  # it works again before its limit is the short one


def test_a_server_ends_in_its_time_though_the_engine_hangs(server, hang, unseen):
    """The last one of this server."""
    until(lambda: health(server) == "ok")
    stream = Stream(server)
    hang.write_text("sleep")
    began = time.monotonic()
    server.server.handle_exit(signal.SIGTERM, None)
    until(lambda: server.client.get("/ready").json() == {"status": "ending"})
    refused = server.complete("x")  # the listener still answers
    assert error(refused)[:2] == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) >= 1
    assert stream.failure()["code"] == "shutting_down"
    server.serving.engine.process.wait(60)
    assert time.monotonic() - began < 60  # CLOSING is 120
    hang.unlink()


def test_an_engine_is_started_anew_and_stored_sessions_come_back(tiny_llama, hang, tmp_path, monkeypatch):
    engine = started(tiny_llama, restart=True, session_dir=str(tmp_path / "sessions"))
    with serving(engine) as server:
        ids = random_ids(100, 1)
        for name in ("kept", "busy"):
            assert server.complete(ids, session_id=name).status_code == 200
        # The engine says how it stands after a step.
        until(lambda: server.complete([5]) and (engine.statistics().stored or {}).get("sessions") == 2)
        stream = Stream(server, prompt=[*ids, 7], session_id="busy")
        first = engine.process.pid
        hang.write_text("sleep")
        assert stream.failure()["code"] in ("engine_stuck", "engine_lost")
        hang.unlink()
        until(lambda: health(server) == "ok", 60)
        assert (engine.epoch, engine.process.pid == first) == (1, False)
        turn = server.complete([*ids, 9], session_id="kept")
        assert turn.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 90
        assert server.complete([*ids, 9], session_id="busy").status_code == 200

        # One that ends before its model is loaded is tried again, and then no more.
        tries = [0.0, 0.0]
        monkeypatch.setattr(Starts, "next", lambda starts: tries.pop() if tries else None)
        monkeypatch.setattr(engine_launch, "PROGRAM", (sys.executable, "-c", "pass"))
        engine.process.kill()
        # It is "broken", too, between its end and the first try.
        until(lambda: "stays lost" in server.client.get("/health").json().get("error", ""), 60)
        assert health(server) == "broken"
        assert error(server.complete("x"))[:2] == (503, "engine_lost")


def test_an_engine_of_this_process_that_hangs_is_seen_and_told_too(tiny_llama, monkeypatch):
    llm, gate = make(tiny_llama), threading.Event()
    gate.set()
    real = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (gate.wait(60), real())[1])
    from saccade.server.engines import LocalEngine

    with serving(LocalEngine(llm, limit=LIMIT)) as server:
        stream = Stream(server)
        gate.clear()
        assert stream.failure()["code"] == "engine_stuck"
        assert health(server) == "stuck"
        assert error(server.complete("x"))[:2] == (503, "engine_stuck")
        gate.set()
        until(lambda: health(server) == "ok")
        assert server.complete("x").status_code == 200


def test_an_engine_anew_is_of_a_process_of_its_own_alone(capsys):
    from saccade.cli.main import main

    for other in ("--one-process", "--ray"):
        with pytest.raises(SystemExit):
            main(["serve", "--restart", other])
        assert "--restart" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--step-limit", "0"])
    assert "step_limit=0" in capsys.readouterr().err
