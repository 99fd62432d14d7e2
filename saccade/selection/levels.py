"""Levels: in which layers of a model a sliding window of their own rules, by how many keys a decode row sees.

A layer with a window of w tokens hides nothing from a row of up to w keys, so there the row's method decides. In a
longer row the layer *slides*: it reads its last w keys, and the method is not asked. There is one level more than the
model has sizes of windows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Levels:
    """Of a model whose layers have ``windows``, in tokens; None where a layer has none."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.windows = tuple(windows)
        self.sizes = sorted({one for one in windows if one is not None})

    def of(self, length: int) -> int:
        """The level of a row that sees ``length`` keys: how many sizes of windows are smaller."""
        return bisect_left(self.sizes, length)

    def windows_at(self, level: int) -> tuple[int | None, ...]:
        """The layers' windows that rule at ``level``; None where the method decides."""
        ruling = self.sizes[:level]
        return tuple(one if one in ruling else None for one in self.windows)

    def acting(self, level: int) -> tuple[int, ...]:
        """The layers where the method decides at ``level``."""
        return tuple(layer for layer, window in enumerate(self.windows_at(level)) if window is None)
