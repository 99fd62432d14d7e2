"""The engine's own loop: one thread drives it, any thread or asyncio task talks to it.

Callers put messages into an inbox and get a stream of outputs for each request. Between two steps the loop reads the
inbox; while nobody waits for anything it sleeps. The thread holds the engine only while it works, so that an engine
that nobody uses any more can be collected.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
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
    RestoreSession,
    SaveSession,
    StepOutput,
)
from saccade.engine.request import Request
from saccade.engine.saved import SavedSession
from saccade.engine.stream import AsyncOutputs, Stream
from saccade.errors import SaccadeError

logger = logging.getLogger(__name__)


Message = AddRequest | CancelRequest | ForgetSession | ClearPrefixes | SaveSession | RestoreSession


@dataclass
class _Letter:
    """Messages for the loop, all acted on between the same two steps, and the promise of an answer. ``streams``: where
    the outputs of added requests go. ``threads``: torch's setting where the letter was written, a thread's own."""

    messages: Sequence[Message] = ()
    streams: Sequence[Stream] = ()
    reply: Future[Any] = field(default_factory=Future)
    threads: int = field(default_factory=torch.get_num_threads)


_STOP = _Letter()
_threads: dict[threading.Thread, _Loop] = {}  # those that may not have ended
_loops: weakref.WeakSet[_Loop] = weakref.WeakSet()

CLOSED = "this engine is closed; make a new LLM"
FORKED = "this LLM was made before its process was forked, and runs in the parent; make a new LLM in the forked process"


@atexit.register
def _end_all() -> None:
    """No thread of ours may be at work when the interpreter goes."""
    for thread, loop in list(_threads.items()):
        loop.inbox.put(_STOP)
        thread.join()


def _orphaned() -> None:
    """In a forked process: all threads but one stayed in the parent."""
    _threads.clear()
    if len(_loops):
        torch.set_num_threads(1)  # torch's own threads too: it would wait for them for ever, or crash
    for loop in list(_loops):
        loop.orphaned()


os.register_at_fork(after_in_child=_orphaned)


class Asked:
    """Queues requests where a ``with`` begins, and gives their streams; what has not ended where it is left, an
    interrupt say, is cancelled. There is no moment in between that could leave a request running."""

    def __init__(self, engine: AsyncEngine, messages: Sequence[AddRequest]) -> None:
        self.engine = engine
        self.letter = _Letter(messages, [Stream(message.request_id) for message in messages])

    def __enter__(self) -> list[Stream]:
        try:
            self.engine._send(self.letter).result()
            return list(self.letter.streams)
        except BaseException:
            self.end()
            raise

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Cancel what has not ended."""
        reply = self.letter.reply
        if not reply.cancel() and (not reply.done() or reply.exception() is None):
            left = [stream.request_id for stream in self.letter.streams if not stream.ended]
            if left:
                self.engine.cancel(left)


class AsyncEngine:
    """An engine behind an inbox. Every method may be called from any thread.

    ``max_waiting`` bounds the requests that queue for the engine: adding more waits until there is room.
    """

    def __init__(self, engine: Engine, max_waiting: int = 1024) -> None:
        self.engine = engine
        self._loop = _Loop(weakref.ref(engine), max_waiting)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._loop.inbox.put, _STOP)

    def add(self, messages: Sequence[AddRequest]) -> list[Stream]:
        """Queue requests, all of them before the next step; waits while the queue is full. Raises what Engine.add
        raises, and then none is queued. The caller sees to it that they end: :meth:`asked` does so by itself."""
        return Asked(self, messages).__enter__()

    def asked(self, messages: Sequence[AddRequest]) -> Asked:
        """:meth:`add` for a ``with`` statement, which cancels what has not ended when it is left."""
        return Asked(self, messages)

    def outputs(self, stream: Stream) -> Iterator[StepOutput]:
        """The outputs of a request until it has ended. Leaving early cancels it."""
        finished = False
        try:
            while not finished:
                output = stream.wait()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.cancel([stream.request_id])

    async def submit(self, messages: Sequence[AddRequest]) -> AsyncOutputs:
        """:meth:`add` for asyncio: while the queue is full this waits without blocking the event loop. Cancelling the
        task until then leaves nothing behind; afterwards ``AsyncOutputs.close`` ends what runs."""
        outputs = AsyncOutputs([message.request_id for message in messages], self.cancel_soon)
        try:
            await asyncio.wrap_future(self._send(_Letter(messages, outputs.streams)))
        except asyncio.CancelledError:
            outputs.close()
            raise
        return outputs

    async def stream(self, message: AddRequest) -> AsyncIterator[StepOutput]:
        """Queue a request and give its outputs until it has ended. Leaving early, or cancelling the task, cancels it.
        While the queue is full this waits without blocking the event loop."""
        outputs = await self.submit([message])
        try:
            while not outputs.finished:
                for output in await outputs.take():
                    yield output
        finally:
            outputs.close()

    def cancel(self, request_ids: Sequence[int]) -> None:
        """End requests and wait until they have ended. Those that have ended already stay as they are, as all have in a
        closed engine."""
        if not self._loop.closed:
            self._send(_Letter([CancelRequest(one) for one in request_ids])).result()

    def cancel_soon(self, request_ids: Sequence[int]) -> None:
        """Like :meth:`cancel`, without waiting."""
        if not self._loop.closed:
            self._send(_Letter([CancelRequest(one) for one in request_ids]))

    @property
    def waiting(self) -> int:
        """Requests that queue for the engine, those among them that it has not let in yet."""
        held = sum(len(letter.streams) for letter in list(self._loop.held))
        return len(self.engine.scheduler.waiting) + held

    @property
    def running(self) -> int:
        """Requests that the engine works on."""
        return len(self.engine.scheduler.running)

    @property
    def alive(self) -> bool:
        """Whether requests can be added: not after :meth:`close`, or once the thread has broken."""
        return not self._loop.closed

    def forget(self, session: int) -> None:
        """Drop a session and wait until its blocks are back."""
        if not self._loop.closed:
            self._send(_Letter([ForgetSession(session)])).result()

    def save(self, session: int) -> SavedSession:
        """A copy of a session between two turns. RequestError while one runs."""
        return self._send(_Letter([SaveSession(session)])).result()

    def restore(self, saved: SavedSession, damaged: list[str], recompute: bool) -> tuple[int, str | None]:
        """Open a session with what was saved (see engine.saved.restore_sequence): its id, and what is to be said."""
        return self._send(_Letter([RestoreSession(saved, damaged, recompute)])).result()

    def clear_prefixes(self) -> None:
        """Give up what is kept of ended requests, and wait until its blocks are back."""
        if not self._loop.closed:
            self._send(_Letter([ClearPrefixes()])).result()

    def forget_soon(self, session: int) -> None:
        """Like :meth:`forget`, without waiting: for finalizers, which may run anywhere."""
        if not self._loop.closed:
            self._send(_Letter([ForgetSession(session)]))

    def close(self) -> None:
        """Cancel everything, end the loop and wait for it. Later calls raise SaccadeError."""
        if self._loop.why_closed == FORKED:
            return
        with self._starting:
            thread, self._thread = self._thread, None
            self._loop.closed = True
            self._loop.inbox.put(_STOP)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _send(self, letter: _Letter) -> Future[Any]:
        if self._loop.closed:
            raise SaccadeError(self._loop.why_closed)
        if self._thread is None or self._thread.ident is None:  # an interrupt can come before its start
            with self._starting:
                if (self._thread is None or self._thread.ident is None) and not self._loop.closed:
                    self._thread = threading.Thread(
                        target=_drive, args=(self._loop,), name="saccade-engine", daemon=True
                    )
                    for ended in [one for one in list(_threads) if not one.is_alive()]:
                        _threads.pop(ended, None)
                    _threads[self._thread] = self._loop
                    self._thread.start()
        self._loop.inbox.put(letter)
        return letter.reply


@dataclass(eq=False)
class _Loop:
    """What the loop's thread works on. It refers to the engine weakly while it sleeps."""

    engine_ref: weakref.ref[Engine]
    max_waiting: int
    inbox: SimpleQueue[_Letter] = field(default_factory=SimpleQueue)
    held: deque[_Letter] = field(default_factory=deque)  # letters that wait until the queue is shorter, in order
    live: dict[int, tuple[Request, Stream]] = field(default_factory=dict)
    closed: bool = False
    why_closed: str = CLOSED

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
        assert engine is not None, "letters are read while somebody holds the engine"
        return engine

    def read(self, letter: _Letter) -> None:
        """Do what a letter asks for, or put it off."""
        full = len(self.engine.scheduler.waiting) >= self.max_waiting
        if letter.streams and (full or self.held):
            self.held.append(letter)
        else:
            self._answer(letter)

    def _answer(self, letter: _Letter) -> None:
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
        letter.reply.set_result(answer)

    def _act(self, message: Message, added: list[Request]) -> Any:
        engine = self.engine
        if isinstance(message, AddRequest):
            shared = next((one for one in added if one.id == message.shares), None)
            added.append(engine.receive(message, shared))
        elif isinstance(message, ForgetSession):
            turn = engine.forget_session(message.session)
            if turn is not None:
                self._ended(turn.id)
        elif isinstance(message, ClearPrefixes):
            if engine.prefixes is not None:
                engine.prefixes.clear()
        elif isinstance(message, SaveSession):
            return engine.save_session(message.session)
        elif isinstance(message, RestoreSession):
            return engine.restore_session(message.saved, message.damaged, message.recompute)
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
        """One engine step, and its outputs to whoever reads them."""
        engine = self.engine
        try:
            outputs = engine.step()
        except BaseException as error:  # nothing that is one request's own: all that run give up, the loop goes on
            logger.exception("an engine step failed")
            outputs = engine.abandon(f"the engine's step failed: {type(error).__name__}: {error}")
        for output in outputs:
            known = self.live.get(output.request_id)
            if known is not None:
                if output.finished:
                    del self.live[output.request_id]
                known[1].put(output)
        while self.held and len(engine.scheduler.waiting) < self.max_waiting:
            self._answer(self.held.popleft())

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
            if letter is not _STOP and letter.reply.set_running_or_notify_cancel():
                letter.reply.set_exception(SaccadeError("this engine was closed"))
        self.held.clear()


def _drive(loop: _Loop) -> None:
    """The thread."""
    try:
        _work(loop)
    except BaseException:  # a mistake of ours: nobody may wait for ever
        logger.exception("the engine's loop broke")
        loop.end()


def _work(loop: _Loop) -> None:
    """Sleep on the inbox, work while requests live."""
    while True:
        letter = loop.inbox.get()
        engine = loop.engine_ref()  # held while there is work
        if letter is _STOP or engine is None:
            loop.end()
            return
        loop.read(letter)
        del letter
        while loop.live or loop.held:
            try:
                while True:
                    letter = loop.inbox.get_nowait()
                    if letter is _STOP:
                        loop.end()
                        return
                    loop.read(letter)
            except Empty:
                pass
            if loop.live or loop.held:
                loop.step()
        del engine
