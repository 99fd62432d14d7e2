"""Recorded steps within a window: everything, or both ends, less what the window hides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from saccade.selection import Cone
from saccade.selection.forms import MOST, Known, Numbers
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import OwnReading, Reading


@dataclass(frozen=True)
class SeenKeys(OwnReading[None]):
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
        start, seen = self.cone.start(length - 1), self.cone.sink_keys
        if self.window is None or length <= self.sinks + self.window:
            return Known("band" if start > seen else "dense", 0, 0)
        near = length - self.window  # the first of its own last keys
        alone = start <= seen or (min(self.sinks, start) <= seen and max(near, seen) >= start)
        apart = min(start, near) >= max(seen, self.sinks)  # else the sinks of one reach into the other's window
        return Known("band" if alone or apart else "tokens", 0, 0)

    def read(self, rows: Any) -> Any:
        from saccade.ops.triton.batched_lists import seen_lists

        return rows.attended(seen_lists(rows))


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
