"""The engine's own loop: one thread drives it, any thread or asyncio task talks to it.

Callers put messages into an inbox and get a stream of outputs for each request. Between two steps the loop reads the
inbox; while no request is open it sleeps. The thread holds the engine only while it works, so that an engine
that is no longer used can be collected.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from saccade.engine.core import Engine
from saccade.engine.inbox import FORKED, STOP, THREADS, Letter, Loop, drive
from saccade.engine.memory.saved import SavedSession
from saccade.engine.messages import (
    AddRequest,
    CancelRequest,
    ClearPrefixes,
    EngineStatistics,
    ForgetSession,
    OpenSession,
    ReportRunning,
    RestoreSession,
    SaveSession,
    StepOutput,
)
from saccade.engine.pieces import Piece
from saccade.engine.stream import AsyncOutputs, Stream
from saccade.errors import SaccadeError


class Asked:
    """Queues requests where a ``with`` begins, and gives their streams; what has not ended where it is left, an
    interrupt say, is cancelled. There is no moment in between that could leave a request running."""

    def __init__(self, engine: AsyncEngine, messages: Sequence[AddRequest]) -> None:
        self.engine = engine
        self.letter = Letter(messages, [Stream(message.request_id) for message in messages])

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
        self._loop = Loop(weakref.ref(engine), max_waiting, gathers=engine.worker.device is not None)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._loop.inbox.put, STOP)

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

    async def submit(self, messages: Sequence[AddRequest], coming: int = 0) -> AsyncOutputs:
        """:meth:`add` for asyncio: while the queue is full this waits without blocking the event loop. Cancelling the
        task until then leaves nothing behind; afterwards ``AsyncOutputs.close`` ends what runs. ``coming``: so many
        more requests follow at once; an engine with nothing to do waits for them (``Loop.gather``)."""
        outputs = AsyncOutputs([message.request_id for message in messages], self.cancel_soon)
        try:
            await asyncio.wrap_future(self._send(Letter(messages, outputs.streams, coming)))
        except asyncio.CancelledError:
            outputs.close()
            raise
        return outputs

    def post(self, messages: Sequence[AddRequest], streams: Sequence[Stream], coming: int = 0) -> Future[None]:
        """:meth:`add` without waiting, for streams of the caller's own. The future can be cancelled until the requests
        are let in; it fails with what :meth:`add` raises. ``coming`` as for :meth:`submit`."""
        return self._send(Letter(messages, streams, coming))

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
            self._send(Letter([CancelRequest(one) for one in request_ids])).result()

    def cancel_all(self) -> None:
        """:meth:`cancel` of all requests that run or wait now."""
        scheduler = self.engine.scheduler
        self.cancel([request.id for request in (*list(scheduler.running), *list(scheduler.waiting))])

    def cancel_soon(self, request_ids: Sequence[int]) -> None:
        """Like :meth:`cancel`, without waiting."""
        if not self._loop.closed:
            self._send(Letter([CancelRequest(one) for one in request_ids]))

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
        """Whether requests can be served: not after :meth:`close`, once the thread has broken, or a rank is lost."""
        return self.trouble is None

    @property
    def trouble(self) -> str | None:
        """Why no request can be served, by name of a lost rank; None where they can."""
        link = self.engine.link
        if link is not None and link.lost is not None:
            return str(link.lost)
        return "this engine has ended" if self._loop.closed else None

    def statistics(self) -> EngineStatistics:
        """How the engine stands."""
        pool, prefixes, device = self.engine.pool, self.engine.prefixes, self.engine.worker.device
        kept = 0 if prefixes is None else prefixes.kept_slots
        ranks = self.engine.config.tensor_parallel_size  # of which each stores as much
        return EngineStatistics(
            self.running,
            self.waiting,
            pool.used_blocks,
            pool.num_blocks,
            len(self.engine.sessions),
            kept,
            tiers=pool.tier_numbers(),
            bytes_by_tier={tier: [each * ranks for each in sizes] for tier, sizes in pool.bytes_by_tier().items()},
            graphs=None if device is None else device.kinds.recorded,
            states=None if pool.states is None else pool.states.numbers(),
            compiled=self.engine.compile_waits.total,
        )

    def after_steps(self, call: Callable[[], None]) -> None:
        """Have the engine's thread call this after each step, and after the letters read before one, once their
        outputs are out."""
        self._loop.delivered.append(call)

    def open_session(self) -> Future[int]:
        """The id of a session that begins, without waiting for it."""
        return self._send(Letter([OpenSession()]))

    def forget(self, session: int) -> None:
        """Drop a session and wait until its blocks are back."""
        if not self._loop.closed:
            self._send(Letter([ForgetSession(session)])).result()

    def save(self, session: int) -> SavedSession:
        """A copy of a session between two turns. RequestError while one runs."""
        self._find_identity()
        return self._send(Letter([SaveSession(session)])).result()

    def restore(self, saved: SavedSession, damaged: list[str], recompute: bool) -> tuple[int, str | None]:
        """Open a session with what was saved (see memory.saved.restore_sequence): its id, and what is to be said."""
        self._find_identity()
        return self._send(Letter([RestoreSession(saved, damaged, recompute)])).result()

    def _find_identity(self) -> None:
        """Have the model's identity found on this thread: the engine's is not to wait while weights are read."""
        _ = self.engine.sessions.identity

    def piece(self, message: Piece) -> Future[Any]:
        """A part of saving or restoring a session, done between two steps (engine.pieces)."""
        return self._send(Letter([message]))

    def running_reports(self, most: int) -> Future[list[dict[str, Any]]]:
        """What at most ``most`` of the requests at work have done so far, without waiting for it: their reports, each
        with its ``request_id``."""
        return self._send(Letter([ReportRunning(most)]))

    def clear_prefixes(self) -> None:
        """Give up what is kept of ended requests, and wait until its blocks are back."""
        if not self._loop.closed:
            self._send(Letter([ClearPrefixes()])).result()

    def forget_soon(self, session: int) -> None:
        """Like :meth:`forget`, without waiting: for finalizers, which may run anywhere."""
        if not self._loop.closed:
            self._send(Letter([ForgetSession(session)]))

    def close(self) -> None:
        """Cancel everything, end the loop and wait for it. Later calls raise SaccadeError."""
        if self._loop.why_closed == FORKED:
            return
        with self._starting:
            thread, self._thread = self._thread, None
            self._loop.closed = True
            self._loop.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def close_soon(self) -> None:
        """Like :meth:`close`, without waiting and without a lock: for handlers of signals, which may come anywhere."""
        self._loop.closed = True
        self._loop.stop()

    def _send(self, letter: Letter) -> Future[Any]:
        if self._loop.closed:
            raise SaccadeError(self._loop.why_closed)
        if self._thread is None or self._thread.ident is None:  # an interrupt can come before its start
            with self._starting:
                if (self._thread is None or self._thread.ident is None) and not self._loop.closed:
                    self._thread = threading.Thread(
                        target=drive, args=(self._loop,), name="saccade-engine", daemon=True
                    )
                    for ended in [one for one in list(THREADS) if not one.is_alive()]:
                        THREADS.pop(ended, None)
                    THREADS[self._thread] = self._loop
                    self._thread.start()
        self._loop.inbox.put(letter)
        return letter.reply
