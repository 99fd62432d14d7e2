"""All keys within a window, as rows read them that are counted by their length alone; and as several rows of a request
read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from saccade.selection.base import Selection, Shape
from saccade.selection.forms import Known, Summarized
from saccade.selection.readings import Ends, Everything
from saccade.selection.window import Cone


@dataclass(frozen=True)
class VisibleKeys(Everything):
    """All keys, as far as ``cone`` shows them, of rows that count what they read by their length."""

    cone: Cone | None = None

    def cost(self, length: int, step: int = 0) -> Known:
        assert self.cone is not None
        hidden = _hidden(self.cone, (length - 1) // self.cone.block_size)
        return Known("band" if hidden else "dense", length - hidden, 0)


@dataclass(frozen=True)
class WindowKeys(Everything):
    """The last ``window`` keys up to each row's own, of a layer with a sliding window. It is part of the form: a model
    has few of them."""

    window: int = 1

    @property
    def ends(self) -> tuple[int, int | None]:
        return 0, self.window

    @property
    def all_upto(self) -> int:
        return self.window

    def cost(self, length: int, step: int = 0) -> Known:
        return Ends(0, self.window).cost(length)

    def selection(self, shape: Shape, lists: Sequence[Tensor]) -> Selection:
        return Ends(0, self.window).selection(shape, lists)


def rows_within(window: int | None, rows: int, kept: Summarized | None = None) -> Everything:
    """What at most ``rows`` rows of a request read in a layer with such a sliding ``window``, or with none."""
    return Everything(rows, kept) if window is None else WindowKeys(rows, kept, window)


@lru_cache(maxsize=4096)
def _hidden(cone: Cone, block: int) -> int:
    """Keys that ``cone`` hides from each row of a block of its grid."""
    return max(0, cone.start(block * cone.block_size) - cone.sink_keys)
