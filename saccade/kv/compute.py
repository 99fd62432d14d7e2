"""Which processor attends keys that lie in host memory (``kv_compute``): the device, which fetches them, or the CPU,
where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
MODES = ("device", "host", "auto")
KEEPS = 0.9  # of what was measured before, after a further call
AGAIN = 64  # calls after which the link is measured once more


class Compute:
    """By ``mode``: ``device`` fetches all that is read, ``host`` nothing. ``auto`` rents before it buys (Karlin et al.,
    1988, "Competitive snoopy caching"): a part is attended on the CPU until that has taken as long as its fetch would
    have, and fetched then; what would be driven out before it is read again is never fetched where the CPU is faster.
    So a step takes at most twice what the best choice in hindsight takes. Both are measured in seconds a part, on
    ``attended`` and ``fetched`` calls. ``lodges_all``: under ``host`` every method's decode rows, not only those that
    follow their keys, run on the CPU over sequences that live there, so that methods can be compared there."""

    lodges_all = False

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.here: float | None = None
        self.link: float | None = None
        self._calls = 0
        self._uses: dict[int, Array] = {}  # by layer: how often each block was attended on the CPU since it came last

    def rents(self, layer: int, blocks: Array, fits: bool) -> Array:
        """Which of ``blocks``, absent ones, are to be attended on the CPU: bool like them. ``fits``: all that the call
        reads can stay on the device."""
        if self.mode != "auto":
            return np.full(len(blocks), self.mode == "host")
        if self.here is None:
            return np.ones(len(blocks), dtype=bool)
        if self.link is None:
            return np.full(len(blocks), not fits)
        if not fits:
            return np.full(len(blocks), self.here <= self.link)
        uses = self._of(layer, blocks)[blocks]
        return np.asarray((uses + 1) * self.here <= self.link)

    def attended(self, layer: int, blocks: Array, parts: int, seconds: float) -> None:
        """``blocks`` of a layer were attended on the CPU, ``parts`` of them together."""
        self.here = _mixed(self.here, seconds / max(1, parts))
        if self.mode == "auto":
            self._of(layer, blocks)[blocks] += 1

    def measures(self) -> bool:
        """Whether the fetch at hand is to be timed."""
        self._calls += 1
        return self.mode == "auto" and (self.link is None or self._calls % AGAIN == 0)

    def fetched(self, layer: int, blocks: Array, parts: int, seconds: float | None) -> None:
        """``blocks`` of a layer come to the device; in so many seconds, if that was measured."""
        if seconds is not None and parts:
            self.link = _mixed(self.link, seconds / parts)
        if self.mode == "auto" and len(blocks):
            self._of(layer, blocks)[blocks] = 0

    def _of(self, layer: int, blocks: Array) -> Array:
        held, wanted = self._uses.get(layer), int(blocks.max(initial=-1)) + 1
        if held is None or len(held) < wanted:
            grown = np.zeros(max(1024, 2 * wanted), dtype=np.int32)
            if held is not None:
                grown[: len(held)] = held
            self._uses[layer] = held = grown
        return held


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else KEEPS * before + (1 - KEEPS) * now
