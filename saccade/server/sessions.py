"""Sessions that clients name. Each key has names of its own."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from saccade.errors import shown
from saccade.llm import LLM
from saccade.server.admission import Caller
from saccade.server.errors import ApiError, bad_request

LONGEST = 256  # characters of a name


@dataclass
class Held:
    """One session while the server keeps it. ``id``: the engine's."""

    id: int
    busy: bool = False
    used: float = field(default_factory=time.monotonic)


class Sessions:
    """At most ``most`` of them, the least recently used ones go first; each is forgotten ``seconds`` after its last
    turn. They live on the event loop's thread alone."""

    def __init__(self, llm: LLM, most: int, seconds: float) -> None:
        self._llm, self._most, self._seconds = llm, most, seconds
        self._held: OrderedDict[tuple[str, str], Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def acquire(self, caller: Caller, name: str) -> Held:
        """The caller's session of that name, made where there is none, for one turn. 409 while it has another."""
        self.check(name)
        self._expire()
        place = (caller.name, name)
        held = self._held.get(place)
        if held is None:
            self._make_room()
            held = self._held[place] = Held(self._llm.engine.open_session())
        elif held.busy:
            raise ApiError(
                409, f"the session {shown(name)} is still answering; wait for that turn", "session_busy", "session_id"
            )
        held.busy = True
        self._held.move_to_end(place)
        return held

    def release(self, held: Held) -> None:
        """Its turn has ended."""
        held.busy, held.used = False, time.monotonic()

    def forget(self, caller: Caller, name: str) -> bool:
        """Drop a session with its keys and values; a turn that runs is cancelled. False where there is none."""
        held = self._held.pop((caller.name, name), None)
        if held is not None:
            self._llm.loop.forget_soon(held.id)
        return held is not None

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
        self._llm.loop.forget_soon(self._held.pop(place).id)
