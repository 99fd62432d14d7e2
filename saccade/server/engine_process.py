"""The engine in a process of its own: reads frames, lets the engine's loop run, writes what each step did.

It ends with the process that started it: where that goes, whatever killed it, the socket between them is closed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from saccade.engine.messages import StepOutput
from saccade.engine.settings.config import EngineConfig
from saccade.engine.stream import Stream
from saccade.engine.watch.pulse import Pulse
from saccade.errors import SaccadeError
from saccade.llm import LLM
from saccade.machine import device_note
from saccade.methods.policy import Policy
from saccade.server import warming, wire, wire_forms
from saccade.server.engines import about_llm, compiler_of
from saccade.server.kv_events import KVEvents
from saccade.server.logs import log_to_stderr
from saccade.server.matchers import Compiler, Grammar
from saccade.server.named_sessions import NamedSessions

SWITCH = 0.0005  # seconds that frames are worked on before the engine's thread goes on, at most; Python's is 0.005
ALIVE = 1.0  # seconds between two looks at whether the loop still runs


class Outbox:
    """Frames on their way out. The engine's thread never waits for a reader: what the socket does not take at once a
    thread of its own sends, in order."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lock = channel, threading.Lock()
        self._rest: deque[memoryview] = deque()
        self._more = threading.Semaphore(0)
        threading.Thread(target=self._send_rest, name="saccade-outbox", daemon=True).start()

    def send(self, *frames: wire.Frame) -> None:
        """Send frames after those before them: the reader wakes once."""
        data = memoryview(b"".join(map(wire.framed, frames)))
        with self._lock:
            if not self._rest:
                try:
                    data = data[self._channel.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:  # the reader is gone; the reading side sees it too
                    return
            if data:
                self._rest.append(data)
                self._more.release()

    def drained(self) -> bool:
        with self._lock:
            return not self._rest

    def drain(self) -> None:
        """Wait until all is sent, or the reader is gone."""
        while not self.drained():
            time.sleep(0.01)

    def _send_rest(self) -> None:
        while True:
            self._more.acquire()
            try:
                self._channel.sendall(self._rest[0])
            except OSError:
                return
            with self._lock:
                self._rest.popleft()


class Outlet(Stream):
    """A stream whose outputs are collected until the step has ended."""

    def __init__(self, request_id: int, collected: list[StepOutput]) -> None:
        super().__init__(request_id)
        self._collected = collected

    def put(self, output: StepOutput) -> None:
        self.ended = output.finished
        self._collected.append(output)


class EngineServer:
    """Does what frames ask for. ``collected``: outputs since the last frame, which the engine's thread alone touches
    once the loop runs."""

    def __init__(self, llm: LLM, outbox: Outbox, compiler: Compiler) -> None:
        self.llm, self.outbox, self._compiler = llm, outbox, compiler
        self.collected: list[StepOutput] = []
        self._named = NamedSessions(llm)
        self._added: dict[int, tuple[Future[Any], list[Outlet]]] = {}
        self._flusher = 0  # the engine's thread, once it has flushed
        self._replies: list[wire.Frame] = []  # those it has given since
        llm.loop.after_steps(self._flush)

    def handle(self, frame: wire.ToEngine) -> bool:
        """Do what a frame asks for; False for the last one."""
        loop = self.llm.loop
        try:
            if isinstance(frame, wire.Add):
                messages = [wire_forms.add_request(one, self._grammar) for one in frame.requests]
                outlets = [Outlet(one.request_id, self.collected) for one in messages]
                self._answer(frame.call, future := loop.post(messages, outlets, frame.coming))
                if not future.done():
                    self._added[frame.call] = future, outlets
            elif isinstance(frame, wire.Withdraw):
                self._withdraw(frame.call)
            elif isinstance(frame, wire.Cancel):
                loop.cancel_soon(frame.request_ids)
            elif isinstance(frame, wire.CheckPolicy):
                self.llm.engine.checks.policy(Policy.parse(frame.policy))
                self._reply(frame.call, None)
            elif isinstance(frame, wire.Session):
                self._session(frame, wire_forms.decoded(frame.name), wire_forms.decoded(frame.owner))
            elif isinstance(frame, wire.ReportRunning):
                self._answer(frame.call, loop.running_reports(frame.most))
            elif isinstance(frame, wire.ClearPrefixes):
                loop.clear_prefixes()
                self._reply(frame.call, None)
            else:
                return False
        except Exception as error:
            self._reply(frame.call, error)
        return True

    def _grammar(self, source: str, name: str) -> Grammar:
        return Grammar(source, name, self._compiler)

    def close(self) -> None:
        """End the engine, once what is to be saved is."""
        self._named.close()
        self.llm.close()

    def _session(self, frame: wire.Session, name: str, owner: str) -> None:
        named = self._named
        if isinstance(frame, wire.OpenSession):
            self._answer(frame.call, named.open(name, owner, frame.session))
        elif isinstance(frame, wire.ForgetSession):
            self._answer(frame.call, named.forget(frame.session, name, owner))
        elif frame.session is not None:
            act = named.save_soon if isinstance(frame, wire.SaveSession) else named.leave
            act(frame.session, name, owner)

    def _answer(self, call: int, future: Future[Any]) -> None:
        """Reply with what ``future`` will be."""

        def done(ended: Future[Any]) -> None:
            self._added.pop(call, None)
            if not ended.cancelled():
                self._reply(call, ended.exception(), None if ended.exception() else ended.result())

        future.add_done_callback(done)

    def _reply(self, call: int, error: BaseException | None, value: Any = None) -> None:
        reply = wire.Reply(call, value, None if error is None else wire_forms.told(error))
        if threading.get_ident() == self._flusher:  # it flushes once it has read its letters
            self._replies.append(reply)
        else:
            self.outbox.send(reply)

    def _withdraw(self, call: int) -> None:
        future, outlets = self._added.pop(call, (None, []))
        if future is not None and not future.cancel():
            self.llm.loop.cancel_soon([outlet.request_id for outlet in outlets])

    def _flush(self) -> None:
        self._flusher = threading.get_ident()
        outputs, replies = [wire_forms.output(one) for one in self.collected], self._replies
        self.collected.clear()
        self._replies = []
        self.outbox.send(*replies, wire.Outputs(0, outputs, self._named.statistics()))


def main(descriptor: int) -> None:
    """Serve the socket ``descriptor`` until it is closed."""
    for one in (signal.SIGINT, signal.SIGTERM):  # a terminal and a supervisor signal whole groups; the parent drains
        signal.signal(one, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH)
    channel = socket.socket(fileno=descriptor)
    arrived = wire.Frames()
    start = json.loads(_first(channel, arrived))
    log_to_stderr(start["log_level"])
    policies = [Policy.parse(one) for one in start["warm"]]
    ahead: warming.KernelsAhead | None = None
    with suppress(SaccadeError):  # which is told below
        ahead = warming.begin(EngineConfig.of(**start["config"]), policies, [descriptor])  # before there are threads
    frames: SimpleQueue[bytes] = SimpleQueue()
    reading = partial(_read, channel, arrived, frames)
    threading.Thread(target=reading, name="saccade-frames", daemon=True).start()
    outbox = Outbox(channel)
    try:
        config = EngineConfig.of(**start["config"])
        if config.threads is not None:
            import torch

            torch.set_num_threads(config.threads)
        if ahead is not None:
            ahead.collect()
        llm = LLM(config=config)
        outbox.send(wire.Loaded(0, str(llm.model.path)))  # the other side reads the tokenizer meanwhile, too
        compiler = compiler_of(llm)
        warming.warm(llm, policies, ahead)
        warming.settle(llm)
        gc.collect()
        gc.freeze()  # it stays until the process ends: no later collection need walk over all of it
        if start["kv_events"] is not None:
            KVEvents(llm, **start["kv_events"])
    except Exception as error:
        outbox.send(wire.Reply(0, None, wire_forms.told(error)))
        sys.exit(2)
    server = EngineServer(llm, outbox, compiler)
    note = device_note(llm.model.device)
    outbox.send(wire.Ready(0, wire_forms.about_dict(about_llm(llm)), note, llm.loop.statistics()))
    pulse = llm.engine.watch.pulse
    threading.Thread(target=_beat, args=(pulse, outbox, start["beat"]), name="saccade-beat", daemon=True).start()
    more = True
    while more:
        with suppress(Empty):
            more = server.handle(wire.to_engine(frames.get(timeout=ALIVE)))
        if more and (why := llm.loop.trouble) is not None:
            outbox.send(wire.Gone(0, why))
            outbox.drain()
            sys.exit(1)
    server.close()
    outbox.drain()
    gc.unfreeze()  # see serve()


def _beat(pulse: Pulse, outbox: Outbox, seconds: float) -> None:
    """Signs of life, so many seconds apart, from a thread of their own: the others may wait for a step."""
    while True:
        if outbox.drained():
            outbox.send(wire.Beat(0, pulse.quiet, pulse.processor))
        time.sleep(seconds)


def _first(channel: socket.socket, frames: wire.Frames) -> bytes:
    """The parent's first frame, behind which it sends nothing until it is answered."""
    while data := channel.recv(1 << 20):
        if contents := list(frames.feed(data)):
            return contents[0]
    os._exit(1)


def _read(channel: socket.socket, frames: wire.Frames, into: SimpleQueue[bytes]) -> None:
    """Frames from the parent. Without it there is nothing to do."""
    try:
        while data := channel.recv(1 << 20):
            for content in frames.feed(data):
                into.put(content)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
