"""Data of recorded steps for rows whose methods bring readings of their own: the words of their device states, their
windows, and counts of what they read, kept on the device until a report asks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from saccade.methods.device_state import REALS, WORDS, DeviceState
from saccade.ops.row_words import ConeNumbers
from saccade.ops.tallies import BESIDE, Counted
from saccade.selection import Cone


@dataclass
class _Row:
    """What lies in one row."""

    state: weakref.ref[DeviceState] | None = None
    room: int = 0
    cones: tuple[Cone | None, ...] = ()


class RowWords:
    """Of ``rows`` rows, at addresses that stay: ``words`` int64 [layers, rows, WORDS], ``reals`` float64 [layers, rows,
    REALS], and ``cones`` float64 [layers, rows, 4], the ConeNumbers of each row's window. ``tallies`` float64 [layers,
    rows, heads + BESIDE] and ``least`` float32 [layers, rows]: what was counted since it was taken (ops/tallies.py)."""

    def __init__(self, layers: int, rows: int, heads: int, device: torch.device) -> None:
        self.layers, self.heads, self.device = layers, heads, device
        self.words = torch.zeros(layers, rows, WORDS, dtype=torch.int64, device=device)
        self.reals = torch.zeros(layers, rows, REALS, dtype=torch.float64, device=device)
        self.cones = torch.zeros(layers, rows, 4, dtype=torch.float64, device=device)
        self.tallies = torch.zeros(layers, rows, heads + BESIDE, dtype=torch.float64, device=device)
        self.least = torch.ones(layers, rows, dtype=torch.float32, device=device)
        self._held = [_Row() for _ in range(rows)]

    def hold(self, row: int, state: DeviceState, cones: tuple[Cone | None, ...], length: int) -> None:
        """Make ``row``, which sees ``length`` keys, one of ``state``'s sequence, under the windows ``cones``, one a
        layer."""
        held = self._held[row]
        if held.cones != cones:
            self.cones[:, row] = torch.tensor([_numbers(cone) for cone in cones], dtype=torch.float64, device="cpu").to(
                self.device
            )
        if length > state.room:
            state.grow(length)
        elif held.state is not None and held.state() is state and length <= held.room and held.cones == cones:
            return
        for table, of in ((self.words, state.words), (self.reals, state.reals)):
            lists = [list(of(layer)) for layer in range(self.layers)]
            padded = [one + [0] * (table.shape[2] - len(one)) for one in lists]
            table[:, row] = torch.tensor(padded, dtype=table.dtype, device="cpu").to(self.device)
        self._held[row] = _Row(weakref.ref(state), state.room, cones)

    def take(self, row: int) -> Counted:
        """What was counted in ``row`` since the last time; counting begins anew."""
        taken = Counted.of(self.tallies[:, row].cpu().clone(), self.least[:, row].cpu().clone())
        self.tallies[:, row] = 0.0
        self.least[:, row] = 1.0
        return taken


def _numbers(cone: Cone | None) -> ConeNumbers:
    return ConeNumbers() if cone is None else ConeNumbers(cone.share, cone.sink_keys, cone.local, cone.block_size)
