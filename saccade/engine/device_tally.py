"""Whose counts each row of recorded steps gathers."""

from __future__ import annotations

import weakref
from functools import partial

from saccade.engine.device_counts import LateCounts
from saccade.engine.device_rows import RowBuffers
from saccade.selection.plan import DevicePlan


class RowCounts:
    """``rows``: by row of the buffers, what it counts for. ``heads``: query heads of the model."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.rows: dict[int, LateCounts] = {}
        self._all: weakref.WeakValueDictionary[tuple[int, str], LateCounts] = weakref.WeakValueDictionary()

    def of(self, request_id: int, plan: DevicePlan) -> LateCounts:
        """What a request counts under a plan."""
        held = (request_id, plan.name)
        counts = self._all.get(held)
        if counts is None:
            counts = self._all[held] = LateCounts(plan, self.heads)
        return counts

    def attach(self, row: int, request_id: int, plan: DevicePlan, buffers: RowBuffers) -> None:
        """Let ``row`` of ``buffers`` count for a request under its plan from now on."""
        counts = self.of(request_id, plan)
        if counts.row == row and self.rows.get(row) is counts:
            return
        for other in (row, counts.row):
            self._detach(other)
        self.rows[row] = counts
        counts.attach(row, partial(buffers.take, row) if plan.keeps or plan.ruled else None)

    def detach(self) -> None:
        """Take what all rows have counted: their buffers go."""
        for row in list(self.rows):
            self._detach(row)

    def _detach(self, row: int | None) -> None:
        counts = None if row is None else self.rows.pop(row, None)
        if counts is not None:
            counts.detach()
