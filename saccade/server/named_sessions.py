"""Sessions by owner and name, beside the engine that has them. With a ``session_dir`` they survive it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from saccade.engine.messages import EngineStatistics
from saccade.errors import SaccadeError
from saccade.llm import LLM
from saccade.server.logs import logger
from saccade.sessions.durable import Restored

LOOK = 1.0  # seconds


class NamedSessions:
    """Opens, saves and forgets the sessions of ``llm``. Nothing here waits: what takes long runs on threads."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._stored = llm, llm.sessions
        self._looked = -LOOK
        self._report: dict[str, Any] = {}
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="saccade-named")

    def open(self, name: str, owner: str, held: int | None = None) -> Future[int]:
        """The engine's id of the session that is stored under the name, or of a new one. A client says its whole
        context anew, so where what is stored is of no use nothing is lost but time; the log and the report say so.
        ``held``: the session's id so far, which stays unless another process has stored a later turn."""
        if self._stored is None:
            return self._llm.loop.open_session()
        return self._threads.submit(self._open, name, owner, held)

    def save_soon(self, session: int, name: str, owner: str) -> None:
        """After a turn: store it, if sessions are stored."""
        if self._stored is not None:
            self._stored.save_soon(session, name, {}, {}, owner)

    def leave(self, session: int, name: str, owner: str) -> None:
        """Drop the engine's session, once it is saved; what is stored stays."""
        if self._stored is None:
            self._llm.loop.forget_soon(session)
        else:
            self._stored.leave(session, name, owner)

    def forget(self, session: int | None, name: str, owner: str) -> Future[bool]:
        """Drop a session, whose turn is cancelled, and what is stored of it; whether anything was stored."""
        if session is not None:
            self._llm.loop.forget_soon(session)
        if self._stored is None:
            nothing: Future[bool] = Future()
            nothing.set_result(False)
            return nothing
        return self._threads.submit(self._stored.forget, name, owner)

    def statistics(self) -> EngineStatistics:
        """How the engine stands, with what is stored: that is looked at once a second."""
        now = self._llm.loop.statistics()
        if self._stored is None:
            return now
        if time.monotonic() - self._looked > LOOK:
            self._looked, self._report = time.monotonic(), self._stored.report()
        return replace(now, stored=self._report)

    def close(self) -> None:
        """Wait for what runs."""
        self._threads.shutdown()

    def _open(self, name: str, owner: str, held: int | None) -> int:
        assert self._stored is not None
        if held is not None:
            if held in self._llm.engine.sessions and not self._stored.superseded(name, owner):
                return held
            self.leave(held, name, owner)
        restored, why = self._restored(name, owner)
        if restored is not None:
            return restored.number
        number = self._llm.loop.open_session().result()
        if why is not None:
            self._llm.engine.sessions[number].note = f"stored session: {why}; all of it is computed again"
            logger.warning("a stored session was refused", extra={"fields": {"why": why}})
        return number

    def _restored(self, name: str, owner: str) -> tuple[Restored | None, str | None]:
        """The stored session, if there is one, or why it is of no use."""
        assert self._stored is not None
        try:
            return self._stored.restore(name, owner) if self._stored.has(name, owner) else None, None
        except SaccadeError as error:
            return None, str(error)
