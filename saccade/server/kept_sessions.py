"""Sessions of one engine by their owners' names, with the store behind them if there is one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from saccade.engine.messages import EngineStatistics
from saccade.errors import RequestError
from saccade.llm import LLM
from saccade.server.logs import logger


class KeptSessions:
    """Lives where the engine does. What takes long runs on threads of its own."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="saccade-kept")

    def open(self, owner: str, name: str) -> Future[int]:
        """The engine's session: the stored one, or a new one. A client says its whole context anew, so where what is
        stored is of no use nothing is lost but time; the log and the report say so."""
        return self._threads.submit(self._open, owner, name)

    def save_soon(self, number: int, owner: str, name: str) -> None:
        """Store it as it is now, between two turns, in the background."""
        if self._llm.sessions is not None:
            self._llm.sessions.save_soon(number, name, {}, {}, owner)

    def leave(self, number: int, owner: str, name: str) -> None:
        """Drop it from the engine as soon as it is stored, without waiting."""
        if self._llm.sessions is None:
            self._llm.loop.forget_soon(number)
        else:
            self._llm.sessions.leave(number, name, owner)

    def forget_stored(self, owner: str, name: str) -> Future[bool]:
        """Remove what is stored; False where there is nothing."""
        stored = self._llm.sessions
        return self._threads.submit(lambda: stored is not None and stored.forget(name, owner))

    def statistics(self) -> EngineStatistics:
        """How the engine and the store stand."""
        now, stored = self._llm.loop.statistics(), self._llm.sessions
        return now if stored is None else replace(now, stored=stored.report())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _open(self, owner: str, name: str) -> int:
        llm, why = self._llm, None
        if llm.sessions is not None and llm.sessions.has(name, owner):
            try:
                restored = llm.sessions.restore(name, owner)
                if restored is not None:
                    return restored.number
            except RequestError as error:
                why = str(error)
        number = llm.loop.open_session().result()
        if why is not None:
            llm.engine.sessions[number].note = f"stored session: {why}; all of it is computed again"
            logger.warning("a stored session was refused", extra={"fields": {"why": why}})
        return number
