"""Rotary factors of the positions that decode steps ask for, one or a few a step, kept in stretches.

A step of one request asks for one position, and the next step for the one after it. transformers' module runs a dozen
operators for either. So it is asked for a whole stretch of positions once, and steps look theirs up.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

SPAN = 64  # positions of a stretch, which begins at a multiple of it
KEPT = 64  # stretches, those used last; as many rows may be looked up at once


class RotaryTable:
    """cos and sin of rows on the CPU. ``ask``: int64 positions [n] -> cos, sin, each [n, rotary_dim], where a row
    hangs on its position alone."""

    def __init__(self, ask: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._ask = ask
        self._slots: OrderedDict[int, int] = OrderedDict()  # by stretch, the one used last at the end
        self._table: tuple[Tensor, Tensor] | None = None  # cos, sin, each [KEPT * SPAN, rotary_dim]

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What ``ask`` gives for 1 to ``KEPT`` positions. Not to be written to, and good until the next call."""
        places = [self._place(position) for position in positions.tolist()]
        assert self._table is not None
        cos, sin = self._table
        if len(places) == 1:
            here = slice(places[0], places[0] + 1)
            return cos[here], sin[here]
        index = torch.frombuffer(array("q", places), dtype=torch.int64)
        return cos[index], sin[index]

    def _place(self, position: int) -> int:
        """The row of the table that holds ``position``."""
        stretch, offset = divmod(position, SPAN)
        slot = self._slots.get(stretch)
        if slot is None:
            slot = self._fill(stretch)
        else:
            self._slots.move_to_end(stretch)  # what this call has looked up leaves last
        return slot * SPAN + offset

    @torch.inference_mode()  # the table is written to in steps
    def _fill(self, stretch: int) -> int:
        """Ask for a stretch, in place of the one used longest ago where all slots are taken."""
        cos, sin = self._ask(torch.arange(stretch * SPAN, (stretch + 1) * SPAN, device="cpu"))
        if self._table is None:
            self._table = cos.new_empty(KEPT * SPAN, cos.shape[1]), sin.new_empty(KEPT * SPAN, sin.shape[1])
        try:
            slot = len(self._slots) if len(self._slots) < KEPT else self._slots.popitem(last=False)[1]
            here = slice(slot * SPAN, (slot + 1) * SPAN)
            self._table[0][here], self._table[1][here] = cos, sin
            self._slots[stretch] = slot
        except BaseException:  # an interrupt: which slots are taken is not known any more
            self._slots.clear()
            raise
        return slot
