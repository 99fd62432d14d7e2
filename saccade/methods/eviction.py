"""SnapKV and AdaKV: when a prefill ends, keep the keys that its last rows looked at and forget the others for good
(Li et al., 2024; Feng et al., 2024).

The storage of what is forgotten stays until the sequence ends, but no later step or turn reads it, whatever its policy;
the report says so. A later turn reads what is left and its own rows, and chooses again among those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.methods.base import Chunk, Evicting, Method, Query
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.host_state import HostState
from saccade.methods.kept_on_device import KeptKeys, KeptLists
from saccade.methods.kept_on_host import HostKept
from saccade.methods.options import require, require_choice, require_number, require_whole
from saccade.ops.scores import row_logits, top_places
from saccade.selection import Dense, Selection, Shape, Tokens, gone_for
from saccade.selection.csr import offsets_of_lists
from saccade.selection.forms import MOST, PlanSpec
from saccade.selection.plan import DevicePlan

FORGOTTEN = "forgets: it evicted keys for good, and no later step or turn can read them"


@dataclass
class Kept(Evicting):
    """The keys that are left of the first ``length`` ones: ``positions`` int64, sorted, one list per unit. Later keys
    are all there."""

    replaced: ClassVar[frozenset[str]] = frozenset({"positions"})

    positions: list[Tensor]
    length: int

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        fitting.within("length", self.length, 0, sizes.length)
        fitting.require(len(self.positions) in sizes.units, f"has {len(self.positions)} units, not {sizes.units}")
        for kept in self.positions:
            fitting.rising("positions", fitting.tensor("positions", kept, torch.int64, None), self.length)

    def gone(self) -> Tensor:
        gone = torch.ones(len(self.positions), self.length, dtype=torch.bool, device=self.positions[0].device)
        for unit, kept in zip(gone, self.positions):
            unit[kept] = False
        return gone

    def holds(self, length: int) -> bool:
        return length >= self.length

    @property
    def is_whole(self) -> bool:
        """Whether nothing is evicted."""
        return all(kept.numel() == self.length for kept in self.positions)

    def select(self, shape: Shape) -> Selection:
        if self.is_whole:
            return Dense(shape)
        device = self.positions[0].device
        later = torch.arange(self.length, shape.k_len, device=device)
        lists = [torch.cat([kept, later]).to(torch.int32) for kept in self.positions]
        return Tokens(shape, offsets_of_lists(lists, device), torch.cat(lists))


def alive(chunk: Chunk, units: int) -> Tensor:
    """bool [units, k_len]: the keys that no earlier turn evicted."""
    mask = torch.ones(units, chunk.shape.k_len, dtype=torch.bool, device=chunk.q.device)
    if chunk.gone is not None:
        mask[:, : chunk.gone.shape[1]] = ~gone_for(chunk.gone, units)
    return mask


def alive_weights(chunk: Chunk, kv_head: int, start: int, stop: int) -> Tensor:
    """Softmax weights of rows ``start .. stop - 1`` of one KV head's group over the keys that are left: fp32 [group,
    rows, k_len]."""
    shape = chunk.shape
    scores = row_logits(chunk.q, chunk.kv, shape, kv_head, start, stop, chunk.scale, chunk.softcap)
    if chunk.gone is not None:
        heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
        scores.masked_fill_(~alive(chunk, shape.heads)[heads, None], -torch.inf)
    return torch.softmax(scores, -1)


def heaviest(scores: Tensor, count: int) -> Tensor:
    """Sorted places of the ``count`` highest of ``scores`` [m], ties to the lower place."""
    return top_places(scores[None], count)[0]


@dataclass(frozen=True)
class SnapKV(Method):
    """When a prefill leaves more than ``capacity`` keys, keep the last ``window`` ones and those before them with the
    most weight from the last ``window`` rows, summed over rows and averaged over ``kernel`` neighbours (zeros beyond
    the ends count). Keys generated later are all kept.

    ``unit="kv_head"`` evicts per KV head, by the group's mean, as a cache entry belongs to all of a group;
    ``"q_head"`` is the original, which repeats keys per query head.
    """

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV, arXiv:2404.14469"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    evicts: ClassVar[bool] = True

    capacity: int = 1024
    window: int = 64
    kernel: int = 5
    unit: str = "kv_head"

    def __post_init__(self) -> None:
        require_whole("window", self.window, 1)
        require_whole("capacity", self.capacity, 1)
        require(self.capacity > self.window, "capacity", self.capacity, f"more than window={self.window}")
        require_whole("kernel", self.kernel, 1)
        require(self.kernel % 2 == 1, "kernel", self.kernel, "an odd number")
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        object.__setattr__(self, "tail_rows", self.window)

    def begin(self, segment: Chunk) -> Kept:
        shape, places = segment.shape, torch.arange(segment.shape.k_len, device=segment.q.device)
        left = alive(segment, shape.heads if self.unit == "q_head" else shape.kv_heads)
        there = left.sum(1)
        counts = segment.all_heads(there) if self.joins_heads else there
        if int(counts.sum()) <= len(counts) * self.capacity and not self._overfull(left):
            return Kept([places[mask] for mask in left], shape.k_len)
        segment.cost.notes.append(f"decode: '{self.name}' {FORGOTTEN}")
        recent = max(0, shape.k_len - self.window)
        scores = self.votes(segment)[:, :recent].masked_fill(~left[:, :recent], -torch.inf)
        candidates = left[:, :recent].sum(1)
        if self.joins_heads:
            units = self.choose(segment.all_heads(scores), segment.all_heads(candidates).tolist(), counts.tolist())
            chosen = [units[unit] for unit in segment.part.units(len(left))]
        else:
            chosen = self.choose(scores, candidates.tolist(), counts.tolist())
        return Kept([torch.cat([old, places[recent:][mask[recent:]]]) for old, mask in zip(chosen, left)], shape.k_len)

    def select_decode(self, query: Query, state: Any) -> Selection:
        return state.select(query.shape)

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        return DevicePlan.alike(self, spec, KeptKeys(spec.heads if self.unit == "q_head" else spec.kv_heads))

    def device_state(self, opening: Opening) -> DeviceState:
        return KeptLists(opening)

    def host_state(self, opening: Opening) -> HostState | None:
        whole = super().host_state(opening)
        return HostKept(opening) if whole is None and HostKept.serves(opening) else whole

    def whole_upto(self, opening: Opening) -> int:
        return MOST if all(state is not None and state.is_whole for state in opening.states) else 0

    def _overfull(self, left: Tensor) -> bool:
        return bool((left.sum(1) > self.capacity).any())

    def votes(self, segment: Chunk) -> Tensor:
        """Pooled weight of every key before the window: fp32 [units, k_len - window]."""
        shape = segment.shape
        before, sums = shape.k_len - self.window, []
        segment.cost.scored += shape.causal_pairs
        for kv_head in range(shape.kv_heads):
            weights = alive_weights(segment, kv_head, 0, shape.q_len)[..., :before].sum(1)
            sums.append(weights if self.unit == "q_head" else weights.mean(0, keepdim=True))
        return self.pooled(torch.cat(sums))

    def pooled(self, votes: Tensor) -> Tensor:
        """``votes`` [units, m], each key's joined with its neighbours'."""
        return torch.nn.functional.avg_pool1d(votes[None], self.kernel, 1, self.kernel // 2)[0]

    def choose(self, scores: Tensor, candidates: Sequence[int], left: Sequence[int]) -> list[Tensor]:
        """Places below the window that each unit keeps. ``scores`` [units, m], -inf where a key is gone already;
        ``candidates`` how many are not, ``left`` the same with the window's."""
        return [
            heaviest(one, min(count, max(0, self.capacity - (total - count))))
            for one, count, total in zip(scores, candidates, left)
        ]


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV's weights with one budget for all units of a layer, ``capacity`` each on average: the heaviest keys
    wherever they are, but at least ``safeguard`` of its even share for each unit: of ``capacity - window``, beside the
    window, as in the authors' code (``floor="beside"``), or of ``capacity``, the window's keys among them, as in
    kvpress (``"within"``)."""

    name: ClassVar[str] = "adakv"
    paper: ClassVar[str] = "Ada-KV, arXiv:2407.11550"

    safeguard: float = 0.2
    floor: str = "beside"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("safeguard", self.safeguard, 0.0, 1.0)
        require_choice("floor", self.floor, ("beside", "within"))

    @property
    def joins_heads(self) -> bool:
        return True  # they share one budget

    def _overfull(self, left: Tensor) -> bool:
        return False  # a unit may keep more than its share

    def choose(self, scores: Tensor, candidates: Sequence[int], left: Sequence[int]) -> list[Tensor]:
        units, places = scores.shape
        budget = sum(max(0, self.capacity - (total - count)) for count, total in zip(candidates, left))
        if self.floor == "beside":
            least = int(self.safeguard * (self.capacity - self.window) + 1e-9)
        else:
            least = max(0, int(self.safeguard * self.capacity + 1e-9) - self.window)
        raised = scores.clone()
        for unit, count in enumerate(candidates):
            raised[unit, heaviest(scores[unit], min(least, count))] = torch.inf
        flat = heaviest(raised.flatten(), min(budget, sum(candidates)))
        return [flat[flat // places == unit] % places for unit in range(units)]
