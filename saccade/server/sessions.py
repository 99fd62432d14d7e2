"""Sessions that clients name. Each key has names of its own. With a ``session_dir`` they survive the server."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from saccade.durable import DurableSessions, Restored
from saccade.errors import RequestError, shown
from saccade.llm import LLM
from saccade.server.admission import Caller
from saccade.server.errors import ApiError, bad_request
from saccade.server.logs import logger

LONGEST = 256  # characters of a name


@dataclass
class Held:
    """One session while the server keeps it. ``id``: the engine's, 0 until it is there."""

    owner: str
    name: str
    id: int = 0
    busy: bool = True
    used: float = field(default_factory=time.monotonic)


class Sessions:
    """At most ``most`` of them, the least recently used ones go first; each is forgotten ``seconds`` after its last
    turn. What the engine stores of them stays, and is restored when it is asked for. They live on the event loop's
    thread alone; ``threads`` do what takes long."""

    def __init__(self, llm: LLM, most: int, seconds: float, threads: ThreadPoolExecutor) -> None:
        self._llm, self._most, self._seconds, self._threads = llm, most, seconds, threads
        self._held: OrderedDict[tuple[str, str], Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    async def acquire(self, caller: Caller, name: str) -> Held:
        """The caller's session of that name, restored or made where there is none, for one turn. 409 while it has
        another."""
        self.check(name)
        self._expire()
        place = (caller.name, name)
        held = self._held.get(place)
        if held is None:
            self._make_room()
            held = self._held[place] = Held(*place)
            try:
                held.id = await self._open(held)
            except BaseException:
                del self._held[place]
                raise
        elif held.busy:
            raise ApiError(
                409, f"the session {shown(name)} is still answering; wait for that turn", "session_busy", "session_id"
            )
        held.busy = True
        self._held.move_to_end(place)
        return held

    def release(self, held: Held, answered: bool) -> None:
        """Its turn has ended; one that was ``answered`` is saved."""
        held.busy, held.used = False, time.monotonic()
        stored = self._llm.sessions
        if self._held.get((held.owner, held.name)) is not held:  # forgotten meanwhile, perhaps while it was opened
            self._llm.loop.forget_soon(held.id)
        elif stored is not None and answered:
            stored.save_soon(held.id, held.name, {}, {}, held.owner)

    async def forget(self, caller: Caller, name: str) -> bool:
        """Drop a session with its keys and values, those that are stored too; a turn that runs is cancelled. False
        where there is none."""
        held, stored = self._held.pop((caller.name, name), None), self._llm.sessions
        if held is not None and held.id:
            self._llm.loop.forget_soon(held.id)
        if stored is None:
            return held is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, stored.forget, name, caller.name) or held is not None

    @staticmethod
    def check(name: str) -> None:
        if not 1 <= len(name) <= LONGEST:
            raise bad_request(f"session_id must have 1 to {LONGEST} characters, got {len(name)}", "session_id")

    def _expire(self) -> None:
        oldest = time.monotonic() - self._seconds
        for place, held in list(self._held.items()):
            if not held.busy and held.used < oldest:
                self._drop(place)

    def _make_room(self) -> None:
        for place in [place for place, held in self._held.items() if not held.busy]:
            if len(self._held) < self._most:
                return
            self._drop(place)
        if len(self._held) >= self._most:
            raise ApiError(429, f"all {self._most} sessions are answering; try again later", "too_many_sessions")

    def _drop(self, place: tuple[str, str]) -> None:
        held, stored = self._held.pop(place), self._llm.sessions
        if stored is None:
            self._llm.loop.forget_soon(held.id)
        else:
            stored.leave(held.id, held.name, held.owner)

    async def _open(self, held: Held) -> int:
        """The engine's session for ``held``: the stored one, or a new one. A client says its whole context anew, so
        where what is stored is of no use nothing is lost but time; the log and the report say so."""
        stored, engine, why = self._llm.sessions, self._llm.engine, None
        if stored is not None:
            loop = asyncio.get_running_loop()
            restoring = loop.run_in_executor(self._threads, _stored, stored, held)
            try:
                restored, why = await asyncio.shield(restoring)
            except asyncio.CancelledError:  # the client has gone; its session is there when it comes again
                restoring.add_done_callback(lambda done: _give_back(stored, held, done.result()[0]))
                raise
            if restored is not None:
                return restored.number
        number = engine.open_session()
        if why is not None:
            engine.sessions[number].note = f"stored session: {why}; all of it is computed again"
            logger.warning("a stored session was refused", extra={"fields": {"why": why}})
        return number


def _stored(stored: DurableSessions, held: Held) -> tuple[Restored | None, str | None]:
    """A session of the store, if there is one, or why it is of no use."""
    try:
        return stored.restore(held.name, held.owner) if stored.has(held.name, held.owner) else None, None
    except RequestError as error:
        return None, str(error)


def _give_back(stored: DurableSessions, held: Held, restored: Restored | None) -> None:
    if restored is not None:
        stored.leave(restored.number, held.name, held.owner)
