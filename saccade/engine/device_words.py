"""What recorded steps know of rows whose methods bring readings of their own: the words of their device states, their
windows, and what they have read, counted until somebody asks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.methods.device_state import REALS, WORDS, DeviceState
from saccade.selection import Cone


class RuleCounts(NamedTuple):
    """What stopping rules let rows do, each [layers, rows, kv_heads]: keys read beyond those known for certain, int64;
    the sum of the estimates of what was covered, float64; and the least of them, float32, 1 where there is none."""

    keys: Tensor
    covered: Tensor
    least: Tensor


class ReadCounts(NamedTuple):
    """What a row's own readings did, each a layer: ``keys`` int64 [layers, heads] that were read; float64 [layers]
    keys ``scored`` exactly, per query head, query heads that ``searches`` counts, and stand-ins that were scored beside
    those that are known (``estimated``)."""

    keys: Tensor
    scored: Tensor
    searches: Tensor
    estimated: Tensor

    def plus(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(*(one + more for one, more in zip(self, other)))


@dataclass
class _Row:
    """What lies in one row."""

    state: weakref.ref[DeviceState] | None = None
    room: int = 0
    cones: tuple[Cone | None, ...] = ()


class RowWords:
    """Of ``rows`` rows, at addresses that stay: ``words`` int64 [layers, rows, WORDS], ``reals`` float64 [layers, rows,
    REALS], and ``cones`` float64 [layers, rows, 4], share, sinks, local and grid of each row's window, all 0 where it
    has none. ``tallies`` float64 [layers, rows, heads + 3]: what ReadCounts counts, since it was taken."""

    def __init__(self, layers: int, rows: int, heads: int, device: torch.device) -> None:
        self.layers, self.heads, self.device = layers, heads, device
        self.words = torch.zeros(layers, rows, WORDS, dtype=torch.int64, device=device)
        self.reals = torch.zeros(layers, rows, REALS, dtype=torch.float64, device=device)
        self.cones = torch.zeros(layers, rows, 4, dtype=torch.float64, device=device)
        self.tallies = torch.zeros(layers, rows, heads + 3, dtype=torch.float64, device=device)
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

    def take(self, row: int) -> ReadCounts:
        """What was counted in ``row`` since the last time; counting begins anew."""
        taken = self.tallies[:, row].cpu().clone()
        self.tallies[:, row] = 0.0
        return read_counts(taken)


def read_counts(tally: Tensor) -> ReadCounts:
    """Of float64 [layers, heads + 3]: keys, scored, searches, estimated."""
    heads = tally.shape[1] - 3
    return ReadCounts(tally[:, :heads].round().long(), *tally[:, heads:].unbind(1))


def _numbers(cone: Cone | None) -> list[float]:
    return [0.0] * 4 if cone is None else [cone.share, cone.sink_keys, cone.local, cone.block_size]
