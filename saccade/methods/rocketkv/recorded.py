"""RocketKV's decode in recorded steps: the kept keys' lists, and what their blocks are known by, grow on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from saccade.methods.device_state import Opening
from saccade.methods.kept_on_device import KeptLists
from saccade.selection.forms import Known, PlanSpec, bucket
from saccade.selection.readings import OwnReading

if TYPE_CHECKING:
    from saccade.methods.rocketkv.method import RocketKept, RocketKV

RING = 4  # rows that may be written before one of them is asked for again: the step after it is launched ahead
LARGEST = 64  # keys of a block that a budget may come to: sqrt(capacity / budget) stays far below


class Words(NamedTuple):
    """A row's int64 words: those of KeptWords, then its blocks. ``extremes``: address of [units, extent, 2, head_dim],
    each block's least and greatest; ``ring``: of [units, RING, 2, head_dim], the same of the last block's keys up to a
    position, at the length that it had there modulo RING."""

    lists: int
    width: int
    counts: int
    since: int
    extremes: int
    extent: int
    ring: int
    size: int
    wanted: int  # blocks that a step reads
    channels: int


@dataclass(frozen=True)
class KeptBlocks(OwnReading["RocketKV"]):
    """The best blocks of the keys that each of ``units`` keeps and of those since, at most ``room`` keys in all."""

    units: int
    room: int

    @classmethod
    def of(cls, method: RocketKV, spec: PlanSpec) -> KeptBlocks:
        if method.budget is None:
            most = -(-method.keys // method.block_size) * method.block_size
        else:
            most = method.budget // 2 + LARGEST
        return cls(spec.heads if method.unit == "q_head" else spec.kv_heads, bucket(most), method=method)

    def cost(self, length: int, step: int = 0) -> Known:
        context = length - 1 - step
        sized, _ = self.method.sized(context, 1)
        left, size = min(sized.capacity, context) + step + 1, sized.block_size
        return Known("tokens", 0, 0, chooses=-(-left // size) > -(-sized.keys // size))

    def read(self, rows: Any) -> Any:
        from saccade.methods.rocketkv import triton_recorded as kernels

        asked = kernels.take_in(rows, self.units, self.room)
        lists, estimated = kernels.best_lists(rows, kernels.score_blocks(rows, asked), asked, self.room)
        return rows.attended(lists)._replace(estimated=estimated)


class RecordedBlocks(KeptLists):
    """Of ``RocketKept`` states."""

    states: list[RocketKept]

    @torch.inference_mode()
    def __init__(self, opening: Opening) -> None:
        self._extremes: list[Tensor] = []  # by layer, as Words says
        super().__init__(opening)
        made = [self._opened(layer, opening) for layer in range(len(self.states))]
        self._extremes, self._rings = [one for one, _ in made], [one for _, one in made]

    def words(self, layer: int) -> Sequence[int]:
        state, extremes = self.states[layer], self._extremes[layer]
        lists, width, counts, since = super().words(layer)
        return Words(
            lists,
            width,
            counts,
            since,
            extremes=extremes.data_ptr(),
            extent=extremes.shape[1],
            ring=self._rings[layer].data_ptr(),
            size=state.size,
            wanted=state.reach // state.size,
            channels=state.channels,
        )

    def reads_all(self, length: int) -> bool:
        return super().reads_all(length) and all(length <= state.reach for state in self.states)

    @torch.inference_mode()
    def grow(self, length: int) -> None:
        super().grow(length)
        self._extremes = [self._padded(layer, one) for layer, one in enumerate(self._extremes)]

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        return [self._settled(state, own, length) for state, own in zip(self.states, self._extremes)]

    def _opened(self, layer: int, opening: Opening) -> tuple[Tensor, Tensor]:
        state, view, stored = self.states[layer], opening.view(layer), opening.length - 1
        state.extend(view, stored)
        counts = state.counts(stored)
        extremes = torch.stack(state.extremes(view, counts), 2).to(view.dtype)
        ring = extremes.new_zeros(len(counts), RING, 2, extremes.shape[3])
        for unit, count in enumerate(counts):
            ring[unit, stored % RING] = extremes[unit, (count - 1) // state.size]
        return self._padded(layer, extremes), ring

    def _padded(self, layer: int, extremes: Tensor) -> Tensor:
        """``extremes`` with room for the blocks of as many keys as the lists have room for."""
        extent = -(-self._lists[layer].shape[1] // self.states[layer].size)
        return torch.nn.functional.pad(extremes, (0, 0, 0, 0, 0, extent - extremes.shape[1]))

    def _settled(self, state: RocketKept, extremes: Tensor, length: int) -> RocketKept:
        full = [own[: count // state.size] for own, count in zip(extremes, state.counts(length))]
        low, high = ([own[:, end].clone(memory_format=torch.contiguous_format) for own in full] for end in (0, 1))
        return replace(state, low=low, high=high)
