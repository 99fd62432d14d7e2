"""Who may ask now: queue limits, limits of keys, and none while the server ends."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from saccade.server.errors import ApiError, bad_request
from saccade.server.keys import Key


@dataclass
class Caller:
    """Who sent a request. ``key``: None where the server needs none. ``route``: which replica it belongs to, where an
    ingress says so."""

    request_id: str
    key: Key | None = None
    span: Any = None  # OpenTelemetry's, where a server has it
    costs: dict[str, Any] = field(default_factory=dict)  # of its samples that have ended, for the log
    route: str = ""
    coming: bool = False  # see Admission.coming

    @property
    def name(self) -> str:
        """What sessions and stored responses are kept apart by."""
        return "" if self.key is None else self.key.name


@dataclass
class _Use:
    """What one key has going on. ``times``: of its requests of the last minute."""

    samples: int = 0
    times: deque[float] = field(default_factory=deque)


class Admission:
    """Counts samples from their admission until they have ended. It lives on the event loop's thread alone.

    ``coming``: requests that are all here and will be handed to the engine, or answered, in a moment.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.samples = 0
        self.draining = False
        self.coming = 0
        self._uses: dict[str, _Use] = {}

    def count(self, caller: Caller) -> None:
        """A request of ``caller``: 429 where its key has sent too many within a minute."""
        key, now = caller.key, time.monotonic()
        if key is None or key.requests_per_minute is None:
            return
        times = self._uses.setdefault(caller.name, _Use()).times
        while times and times[0] <= now - 60:
            times.popleft()
        if len(times) >= key.requests_per_minute:
            why = f"the key {key.name} may send {key.requests_per_minute} requests a minute"
            raise _limited(why, times[0] + 60 - now)
        times.append(now)

    def comes(self, caller: Caller) -> None:
        """The whole request is here."""
        caller.coming = True
        self.coming += 1

    def came(self, caller: Caller) -> None:
        """The engine is about to have it, or it has been answered. Twice does nothing."""
        self.coming -= caller.coming
        caller.coming = False

    def enter(self, caller: Caller, samples: int) -> None:
        """Let ``samples`` in, or raise: 429 with the seconds after which to try again, 503 while the server ends, 400
        for more than would ever be let in."""
        if self.draining:
            raise shutting_down()
        use, key = self._uses.setdefault(caller.name, _Use()), caller.key
        least = self.most if key is None or key.max_concurrent is None else min(self.most, key.max_concurrent)
        if samples > least:
            raise bad_request(
                f"a request may have {least} samples at most, prompts times n, but this has {samples}", "n"
            )
        if key is not None and key.max_concurrent is not None and use.samples + samples > key.max_concurrent:
            raise _limited(f"the key {key.name} may have {key.max_concurrent} samples at work at once", 1)
        if self.samples + samples > self.most:
            raise _limited(f"{self.samples} samples run and wait already, and {self.most} is the most", 1)
        use.samples += samples
        self.samples += samples

    def leave(self, caller: Caller, samples: int) -> None:
        """They have ended."""
        self._uses[caller.name].samples -= samples
        self.samples -= samples


def shutting_down() -> ApiError:
    """The answer to requests that still come."""
    return ApiError(503, "this server is shutting down; ask another one", "shutting_down", headers=_after(5))


def _limited(why: str, seconds: float) -> ApiError:
    return ApiError(429, f"{why}; try again later", "rate_limit_exceeded", headers=_after(seconds))


def _after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, round(seconds + 0.5)))}
