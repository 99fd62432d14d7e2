"""Sessions that clients name. Each key has names of its own. Those that the engine stores survive the server."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from saccade.errors import half_pair, shown
from saccade.server.admission import Caller
from saccade.server.engines import EngineFace
from saccade.server.errors import ApiError, bad_request

LONGEST = 256  # characters of a name


@dataclass
class Held:
    """One session while the server keeps it. ``id``: the engine's, None until it has one; ``epoch``: of the engine that
    gave it. An engine that was started anew knows no ids of the one before."""

    owner: str
    name: str
    id: int | None = None
    epoch: int = 0
    busy: bool = True
    used: float = field(default_factory=time.monotonic)


class Sessions:
    """At most ``most`` of them, the least recently used ones go first; each is forgotten ``seconds`` after its last
    turn. What the engine stores of them stays, and is restored when it is asked for. They live on the event loop's
    thread alone."""

    def __init__(self, engine: EngineFace, most: int, seconds: float) -> None:
        self._engine, self._most, self._seconds = engine, most, seconds
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
            await self._open(place, held)
            return held
        if held.busy:
            raise ApiError(
                409, f"the session {shown(name)} is still answering; wait for that turn", "session_busy", "session_id"
            )
        held.busy = True
        self._held.move_to_end(place)
        # Another replica may have stored a later turn.
        if self._engine.about.session_shared or self._known(held) is None:
            await self._open(place, held)
        return held

    def release(self, held: Held, answered: bool) -> None:
        """Its turn has ended; one that was ``answered`` is stored, unless it was forgotten meanwhile."""
        held.busy, held.used = False, time.monotonic()
        if answered and self._known(held) is not None and self._held.get((held.owner, held.name)) is held:
            self._engine.save_soon(held.id, held.name, held.owner)  # type: ignore[arg-type]

    async def forget(self, caller: Caller, name: str) -> bool:
        """Drop a session with its keys and values, those that are stored too; a turn that runs is cancelled. False
        where there is none."""
        held = self._held.pop((caller.name, name), None)
        stored = await self._engine.forget(None if held is None else self._known(held), name, caller.name)
        return stored or held is not None

    async def _open(self, place: tuple[str, str], held: Held) -> None:
        """Have the engine begin a session, restore it, or go on with it; it is left again where it is not wanted by
        then."""
        opening = asyncio.ensure_future(self._engine.open_session(held.name, held.owner, self._known(held)))
        held.epoch = self._engine.epoch
        try:
            held.id = await asyncio.shield(opening)
            if self._held.get(place) is not held:
                raise ApiError(404, "the session was deleted before its turn began", "session_not_found", "session_id")
        except BaseException:
            if self._held.get(place) is held:
                del self._held[place]
            opening.add_done_callback(lambda done: self._unwanted(done, held))
            raise

    def _unwanted(self, opening: asyncio.Future[int], held: Held) -> None:
        if not opening.cancelled() and opening.exception() is None and held.epoch == self._engine.epoch:
            self._engine.leave(opening.result(), held.name, held.owner)

    def _known(self, held: Held) -> int | None:
        """The id by which the engine knows it; None where it does not."""
        return held.id if held.epoch == self._engine.epoch else None

    @staticmethod
    def check(name: str) -> None:
        if not 1 <= len(name) <= LONGEST:
            raise bad_request(f"session_id must have 1 to {LONGEST} characters, got {len(name)}", "session_id")
        if (why := half_pair(name)) is not None:  # stored names are files, by a digest of their UTF-8
            raise bad_request(f"session_id={shown(name, 80)}: {why}", "session_id")

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
        held = self._held.pop(place)
        if (known := self._known(held)) is not None:
            self._engine.leave(known, held.name, held.owner)
