"""Recorded steps within a window: everything, or both ends, less what the window hides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from saccade.selection import Cone
from saccade.selection.forms import MOST, Known, Numbers
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Everything, OwnReading, Reading


@dataclass(frozen=True)
class SeenKeys(OwnReading):
    """The first ``sinks`` and the last ``window`` keys, or with ``window=None`` all, as far as ``cone`` shows them."""

    windows = True

    sinks: int = 0
    window: int | None = None
    cone: Cone | None = None

    @property
    def form(self) -> SeenKeys:
        return SeenKeys()

    @property
    def numbers(self) -> Numbers:
        return Numbers(min(self.sinks, MOST // 2), MOST // 2 if self.window is None else min(self.window, MOST // 2))

    def cost(self, length: int, step: int = 0) -> Known:
        assert self.cone is not None
        hides = self.cone.start(length - 1) > self.cone.sink_keys
        whole = self.window is None or length <= self.sinks + self.window
        return Known("dense" if whole and not hides else "band", 0, 0)

    def read(self, rows: Any) -> Any:
        from saccade.ops.triton.batched_lists import seen_lists

        return rows.attended(seen_lists(rows))


@dataclass(frozen=True)
class VisibleKeys(Everything):
    """All keys, as far as ``cone`` shows them, of rows that count what they read by their length."""

    cone: Cone | None = None

    def cost(self, length: int, step: int = 0) -> Known:
        assert self.cone is not None
        hidden = _hidden(self.cone, (length - 1) // self.cone.block_size)
        return Known("band" if hidden else "dense", length - hidden, 0)


@lru_cache(maxsize=4096)
def _hidden(cone: Cone, block: int) -> int:
    """Keys that ``cone`` hides from each row of a block of its grid."""
    return max(0, cone.start(block * cone.block_size) - cone.sink_keys)


def windowed(plan: DevicePlan, cones: tuple[Cone | None, ...]) -> DevicePlan | None:
    """``plan`` within ``cones``, one a layer; None where a reading of it knows no windows."""
    layers: list[Reading] = []
    for reading, cone in zip(plan.layers, cones):
        if cone is None or reading.windows:
            layers.append(reading)
        elif reading.ends is not None:
            layers.append(SeenKeys(*reading.ends, cone))
        else:
            return None
    return replace(plan, layers=tuple(layers))
