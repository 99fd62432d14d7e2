"""The work of the engine's thread: it takes messages from the inbox, runs steps, and sends outputs to their readers."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch

from saccade.engine.core import Engine
from saccade.engine.messages import (
    AddRequest,
    CancelRequest,
    ClearPrefixes,
    ForgetSession,
    OpenSession,
    ReportRunning,
    RestoreSession,
    SaveSession,
    StepOutput,
)
from saccade.engine.pieces import Piece, act
from saccade.engine.request import Request
from saccade.engine.stream import Stream
from saccade.engine.watch.pulse import EndedError
from saccade.errors import SaccadeError, failure

logger = logging.getLogger(__name__)
MOST_GATHERED = 0.05  # seconds that the first of several requests waits for the others, at most
EACH_COMING = 0.002  # seconds until the next of those that are on their way, at most, for each of them
FIRSTS = 16  # steps whose times say how long it may wait

Message = (
    AddRequest
    | CancelRequest
    | OpenSession
    | ForgetSession
    | ClearPrefixes
    | SaveSession
    | RestoreSession
    | ReportRunning
    | Piece
)


@dataclass
class Letter:
    """Messages for the loop, all acted on between the same two steps, and the promise of an answer. ``streams``: where
    the outputs of added requests go. ``coming``: how many more requests its writer is about to submit. ``threads``:
    torch's setting where the letter was written, a thread's own."""

    messages: Sequence[Message] = ()
    streams: Sequence[Stream] = ()
    coming: int = 0
    reply: Future[Any] = field(default_factory=Future)
    threads: int = field(default_factory=torch.get_num_threads)


STOP = Letter()
THREADS: dict[threading.Thread, Loop] = {}  # those that may not have ended
_loops: weakref.WeakSet[Loop] = weakref.WeakSet()

CLOSED = "this engine is closed; make a new LLM"
FORKED = "this LLM was made before its process was forked, and runs in the parent; make a new LLM in the forked process"


@atexit.register
def _end_all() -> None:
    """No thread of ours may be at work when the interpreter goes."""
    for thread, loop in list(THREADS.items()):
        loop.stop()
        thread.join()


def _orphaned() -> None:
    """In a forked process: all threads but one stayed in the parent."""
    THREADS.clear()
    if len(_loops):
        torch.set_num_threads(1)  # torch's own threads too: it would wait for them for ever, or crash
    for loop in list(_loops):
        loop.orphaned()


os.register_at_fork(after_in_child=_orphaned)


@dataclass(eq=False)
class Loop:
    """What the loop's thread works on. It refers to the engine weakly while it sleeps. ``delivered``: what that thread
    calls after each step, and after the letters read before one, once their outputs are with the streams."""

    engine_ref: weakref.ref[Engine]
    max_waiting: int
    inbox: SimpleQueue[Letter] = field(default_factory=SimpleQueue)
    held: deque[Letter] = field(default_factory=deque)  # letters that wait until the queue is shorter, in order
    live: dict[int, tuple[Request, Stream]] = field(default_factory=dict)
    closed: bool = False
    why_closed: str = CLOSED
    delivered: list[Callable[[], None]] = field(default_factory=list)
    gathers: bool = False  # a GPU takes hardly longer for several short prompts than for one
    firsts: deque[float] = field(default_factory=lambda: deque(maxlen=FIRSTS))  # seconds of steps after new requests
    _new: bool = False  # whether requests were added since the last step
    _coming: int = 0  # by the last letter with requests

    def __post_init__(self) -> None:
        _loops.add(self)

    def orphaned(self) -> None:
        """Nothing comes any more."""
        self.closed, self.why_closed, self.inbox = True, FORKED, SimpleQueue()
        for _, stream in self.live.values():
            stream.lose(FORKED)

    @property
    def engine(self) -> Engine:
        engine = self.engine_ref()
        assert engine is not None, "letters are read while the engine is held"
        return engine

    def stop(self) -> None:
        """Have the thread end, from any other: between two layers, where it alone runs the model. Several processes
        that share a step end with it."""
        engine = self.engine_ref()
        if engine is not None and engine.link is None:
            engine.watch.pulse.over = True
        self.inbox.put(STOP)

    def read(self, letter: Letter) -> None:
        """Do what a letter asks for, or put it off."""
        self.engine.watch.pulse.beat()
        full = len(self.engine.scheduler.waiting) >= self.max_waiting
        if letter.streams and (full or self.held):
            self.held.append(letter)
        else:
            self._answer(letter)

    def read_all(self, letter: Letter | None = None) -> bool:
        """Read ``letter`` and what else is in the inbox; False once the loop has been stopped."""
        some = False
        with suppress(Empty):
            letter = self.inbox.get_nowait() if letter is None else letter
            while letter is not STOP:
                self.read(letter)
                some = True
                letter = self.inbox.get_nowait()
            self.end()
            return False
        if some:
            self._tell()
        return True

    def gather(self) -> bool:
        """Before the first step of an engine that had nothing to do: read the letters of requests that are on their way
        as well, if it ``gathers``. No request waits longer than a step after new requests took of late, and none where
        no more are coming. False as :meth:`read_all`."""
        end = time.perf_counter() + min(MOST_GATHERED, max(self.firsts, default=0.0))
        while self._coming and self.live and self.gathers:
            now = time.perf_counter()
            try:
                letter = self.inbox.get(timeout=max(0.0, min(end - now, self._coming * EACH_COMING)))
            except Empty:
                break
            if not self.read_all(letter):
                return False
        self._coming = 0
        return True

    def _tell(self) -> None:
        """Call those who wait for what is with the streams by now."""
        for call in self.delivered:
            call()

    def _answer(self, letter: Letter) -> None:
        if not letter.reply.set_running_or_notify_cancel():
            return  # its writer has gone
        if torch.get_num_threads() != letter.threads:
            torch.set_num_threads(letter.threads)
        added: list[Request] = []
        answer: Any = None
        try:
            for message in letter.messages:
                answer = self._act(message, added)
        except Exception as error:
            for request in added:
                self.engine.cancel(request)
            letter.reply.set_exception(error)
            return
        self.live.update({request.id: (request, stream) for request, stream in zip(added, letter.streams)})
        if added:
            self._new, self._coming = True, letter.coming
        letter.reply.set_result(answer)

    def _act(self, message: Message, added: list[Request]) -> Any:
        engine = self.engine
        if isinstance(message, AddRequest):
            shared = next((one for one in added if one.id == message.shares), None)
            added.append(engine.receive(message, shared))
        elif isinstance(message, OpenSession):
            return engine.sessions.open()
        elif isinstance(message, ForgetSession):
            turn = engine.sessions.forget(message.session)
            if turn is not None:
                self._ended(turn.id)
        elif isinstance(message, ClearPrefixes):
            if engine.prefixes is not None:
                engine.prefixes.clear()
        elif isinstance(message, ReportRunning):
            return engine.running_reports(message.most)
        elif isinstance(message, SaveSession):
            return engine.sessions.save(message.session)
        elif isinstance(message, RestoreSession):
            return engine.sessions.restore(message.saved, message.damaged, message.recompute)
        elif isinstance(message, Piece):
            return act(engine.sessions, message)
        elif message.request_id in self.live:
            engine.cancel(self.live[message.request_id][0])
            self._ended(message.request_id)
        return None

    def _ended(self, request_id: int) -> None:
        """Tell the reader of a request that ended between two steps."""
        if request_id in self.live:
            request, stream = self.live.pop(request_id)
            stream.put(StepOutput(request_id, outcome=self.engine.answers.outcome(request)))

    def step(self) -> None:
        """One engine step, and its outputs to their readers."""
        engine, began, new = self.engine, time.perf_counter(), self._new
        engine.watch.pulse.beat()
        self._new = False
        try:
            outputs = engine.step()
        except EndedError:
            outputs = engine.abandon("this engine was closed")
        except BaseException as error:  # nothing that is one request's own: all that run give up, the loop goes on
            logger.exception("an engine step failed")
            outputs = engine.abandon(*failure(error, "the engine's step failed"))
        if new:
            self.firsts.append(time.perf_counter() - began)
        for output in outputs:
            known = self.live.get(output.request_id)
            if known is not None:
                if output.finished:
                    del self.live[output.request_id]
                known[1].put(output)
        while self.held and len(engine.scheduler.waiting) < self.max_waiting:
            self._answer(self.held.popleft())
        self._tell()

    def end(self) -> None:
        """Cancel all requests and turn away all letters."""
        self.closed = True
        for request, _ in list(self.live.values()):
            self.engine.cancel(request)
            self._ended(request.id)
        while True:
            try:
                self.held.append(self.inbox.get_nowait())
            except Empty:
                break
        for letter in self.held:
            if letter is not STOP and letter.reply.set_running_or_notify_cancel():
                letter.reply.set_exception(SaccadeError("this engine was closed"))
        self.held.clear()
        if self.engine_ref() is not None:
            self._tell()


def drive(loop: Loop) -> None:
    """The thread."""
    try:
        _work(loop)
    except BaseException:  # a mistake of ours: no reader may wait for ever
        logger.exception("the engine's loop broke")
        loop.end()


def _work(loop: Loop) -> None:
    """Sleep on the inbox, work while requests live."""
    while True:
        letter = loop.inbox.get()
        engine = loop.engine_ref()  # held while there is work
        if engine is None:
            loop.end()
            return
        try:
            if not loop.read_all(letter) or not loop.gather():
                return
            del letter
            while loop.live or loop.held:
                loop.step()
                if not loop.read_all():
                    return
        finally:
            engine.watch.pulse.rest()
        del engine
