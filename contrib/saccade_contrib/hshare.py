"""HShare: critical tokens shared between steps, heads and layers (Wu et al., ICLR 2025).

Whose sets are alike is found out once a turn, when its prefill ends, from the exact top keys of its last rows: two
units are compared by the overlap of their ``heavy`` heaviest keys. The most alike pair (i, j), i > j, makes j the donor
of i, which takes part no more, until ``round(head_share * units)`` units choose for themselves; a chain of donors ends
at its last. Layers are paired likewise. Where the paper is silent: sets are per KV head, by the group's mean score, and
a shared set keeps the keys that appeared since it was made, as the published masks do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.methods.base import Chunk, Method, Query
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.labels import WHOLE_BITS, Labels
from saccade.methods.measured import Measured
from saccade.methods.options import require_choice, require_number, require_whole
from saccade.ops.scores import row_logits, top_places
from saccade.selection import Dense, Selection
from saccade.selection.forms import Known, PlanSpec, bucket
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import OwnReading
from saccade_contrib.calibrations import ChannelMeans
from saccade_contrib.channels import CALIBRATION, SOURCES, around, heaviest_channels
from saccade_contrib.shared_sets import RecordedSets, Shared


@dataclass(frozen=True)
class SharedSets(OwnReading["HShare"]):
    """What ``HShare`` reads, at most ``room`` keys for each of ``units``; labels are ``channels`` channels in ``bits``
    each."""

    units: int
    room: int
    channels: int
    bits: int

    def why_not(self, spec: PlanSpec) -> str | None:
        return "no kernel of recorded steps retrieves by exact scores" if self.method.source == "exact" else None

    def cost(self, length: int, step: int = 0) -> Known:
        method = self.method
        if length <= method.sinks + method.heavy + method.local:
            return Known("dense", 0, 0)
        return Known("tokens", 0, 0, searchable=True, chooses=length % method.every == 0)

    def read(self, rows: Any) -> Any:
        from saccade.methods.labels.triton_recorded import score_labels
        from saccade.ops.triton.batched_labels import label_keys
        from saccade.ops.triton.batched_lists import choose_keys, new_lists
        from saccade.ops.triton.batched_rows import LayerRead
        from saccade_contrib.triton_shared import shared_lists, whose_turn

        units = self.units
        label_keys(rows.pages, rows.words, self.channels, self.bits)
        due, active, bounds = whose_turn(rows, units)
        scores = score_labels(rows, units, self.channels, self.bits, active)
        room = new_lists(rows, units, self.room)
        chosen = choose_keys(scores, bounds, rows.pages.lengths, *room, active)
        lists = shared_lists(rows, units, due, chosen, self.room)
        out, lse = rows.attend(lists)
        searches = active.view(rows.count, units).sum(1, dtype=torch.float64) * (rows.heads // units)
        estimated = torch.ceil(rows.pages.lengths * searches / rows.heads)
        return LayerRead(out, lse, lists, None, None, searches, estimated)


@dataclass(frozen=True)
class HShare(Method):
    """``heavy`` keys of highest label score between the first ``sinks`` and the last ``local`` ones, retrieved when the
    context's length is a multiple of ``every`` and reused until then. Only the shares ``head_share`` of the units and
    ``layer_share`` of the layers retrieve; the others take the sets of those most like them in the last ``rows`` rows
    of the prompt. The defaults are the paper's 3/4-3/4-1/2.

    Labels are Double Sparsity's (``channels``, ``bits``, ``source``); ``source=exact`` scores the keys themselves.
    """

    name: ClassVar[str] = "hshare"
    paper: ClassVar[str] = "HShare, ICLR 2025"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    calibrations: ClassVar[Mapping[str, type]] = {CALIBRATION: ChannelMeans}
    measured: ClassVar[Measured | None] = Measured(
        "hshare(heavy={value}, source=prompt)", "keys", forced=80, summary=0.0625
    )

    heavy: int = 432
    sinks: int = 16
    local: int = 64
    every: int = 2
    head_share: float = 0.75
    layer_share: float = 0.75
    channels: float = 0.25
    bits: int = 4
    source: str = "offline"
    unit: str = "kv_head"
    rows: int = 32

    def __post_init__(self) -> None:
        for name, least in (("heavy", 1), ("sinks", 0), ("local", 1), ("every", 1), ("rows", 1)):
            require_whole(name, getattr(self, name), least)
        for name in ("head_share", "layer_share", "channels"):
            require_number(name, getattr(self, name), 0.001, 1.0)
        require_choice("bits", self.bits, (2, 4, 8, WHOLE_BITS))
        require_choice("source", self.source, (*SOURCES, "exact"))
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        object.__setattr__(self, "tail_rows", self.rows)

    @property
    def joins_heads(self) -> bool:
        return True  # they take the sets of others that are like them

    @property
    def calibration(self) -> str | None:
        return CALIBRATION if self.source == "offline" else None

    def begin(self, segment: Chunk) -> Shared:
        labels = None
        if self.source != "exact":
            count = self._count(segment.q.shape[-1])
            labels = Labels(heaviest_channels(segment, "qk", count, self.source), self.bits)
            labels.extend(segment.kv)
        critical = segment.all_heads(self._critical(segment))
        units = critical.shape[0]
        alike = torch.stack([_overlap(critical, critical[unit : unit + 1]) for unit in range(units)])
        state = Shared(labels, donors(alike, units - _sharing(self.head_share, units)), critical)
        if segment.layer == segment.layers - 1:
            self._settle_layers([*segment.states[: segment.layer], state])
        return state

    def select_decode(self, query: Query, state: Any) -> Selection:
        shape = query.shape
        if shape.k_len <= self.sinks + self.heavy + self.local:
            return Dense(shape)
        if state.sets is None or shape.k_len % self.every == 0:
            donor = None if state.layer_donor is None else query.states[state.layer_donor]
            if donor is not None and donor.sets is not None:
                state.sets, state.since = donor.sets, donor.since
                query.cost.searches = 0
            else:
                first, last = self.sinks, shape.k_len - self.local
                if state.labels is None:
                    best = self._best(query, first, last)
                else:
                    state.labels.extend(query.kv)
                    best = state.labels.top(query.q[:, 0], self.unit, self.heavy, first, last)
                best = query.all_heads(best)[state.donor]  # others' rows repeat their donors'
                state.sets, state.since = best, last
                heads = self._searching(query, state)
                work = -(-shape.k_len * heads // shape.heads)
                query.cost.searches = heads
                if state.labels is None:
                    query.cost.scored += work
                else:
                    query.cost.estimated += work
        else:
            query.cost.searches = 0
        return around(shape, query.part.own(state.sets), self.sinks, state.since)

    def _searching(self, query: Query, state: Shared) -> int:
        """Query heads of this part that retrieve."""
        units = len(state.donor) // query.part.parts
        return len(set(state.donor).intersection(query.part.units(units))) * query.shape.heads // units

    def _count(self, head_dim: int) -> int:
        return max(1, round(self.channels * head_dim))

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        units = spec.heads if self.unit == "q_head" else spec.kv_heads
        room = bucket(self.sinks + self.heavy + self.local + self.every)
        return DevicePlan.alike(self, spec, SharedSets(units, room, self._count(spec.head_dim), self.bits, method=self))

    def whole_upto(self, opening: Opening) -> int:
        return self.sinks + self.heavy + self.local

    def device_state(self, opening: Opening) -> DeviceState:
        return RecordedSets(opening, self.heavy, self.sinks, self.local, self.every)

    def _best(self, query: Query, first: int, last: int) -> Tensor:
        """The ``heavy`` keys of ``first .. last - 1`` of highest logits for each unit: int32 [units, heavy], rising."""
        shape, rest = query.shape, (0, 1, query.scale, query.softcap)
        logits = [row_logits(query.q, query.kv, shape, g, *rest)[:, 0] for g in range(shape.kv_heads)]
        scores = torch.cat([one if self.unit == "q_head" else one.mean(0, keepdim=True) for one in logits])
        return (top_places(scores[:, first:last], self.heavy) + first).to(torch.int32)

    def _critical(self, segment: Chunk) -> Tensor:
        """The ``heavy`` keys of most weight of the turn's last rows that see more."""
        shape = segment.shape
        first = max(0, min(shape.q_len, self.heavy - shape.q_start))
        segment.cost.scored += shape.causal_pairs
        sets = []
        for kv_head in range(shape.kv_heads):
            rows = first, shape.q_len
            scores = row_logits(segment.q, segment.kv, shape, kv_head, *rows, segment.scale, segment.softcap)
            weights = torch.softmax(scores, -1)
            weights = weights if self.unit == "q_head" else weights.mean(0, keepdim=True)
            best = top_places(weights.flatten(0, 1), min(self.heavy, weights.shape[-1]))
            sets.append(best.view(*weights.shape[:2], best.shape[1]))
        return torch.cat(sets)

    def _settle_layers(self, states: Sequence[Shared | None]) -> None:
        """Find the layers that take others' sets, and forget what the comparison needed."""
        known = [(layer, state.critical) for layer, state in enumerate(states) if state and state.critical is not None]
        for units in dict.fromkeys(len(critical) for _, critical in known):  # others have no such heads
            self._settle_alike(states, [one for one in known if len(one[1]) == units])

    def _settle_alike(self, states: Sequence[Shared | None], known: Sequence[tuple[int, Tensor]]) -> None:
        """The same among layers of as many units."""
        rows = min((critical.shape[1] for _, critical in known), default=0)
        alike = torch.zeros(len(known), len(known), device="cpu")
        for i, (_, one) in enumerate(known):
            for j, (_, other) in enumerate(known[:i]):
                alike[i, j] = _overlap(one[:, one.shape[1] - rows :], other[:, other.shape[1] - rows :]).mean()
        for index, donor in enumerate(donors(alike, len(known) - _sharing(self.layer_share, len(known)))):
            state = states[known[index][0]]
            assert state is not None
            state.layer_donor = None if donor == index else known[donor][0]
            state.critical = None


def _sharing(share: float, count: int) -> int:
    """How many of ``count`` retrieve for themselves."""
    return max(1, round(share * count)) if count else 0


def _overlap(one: Tensor, other: Tensor) -> Tensor:
    """Mean over rows of the share of ``one``'s keys that ``other`` has: sorted, [units, rows, keys] each -> float64
    [units]; 0 without rows."""
    other = other.expand_as(one).contiguous()
    place = torch.searchsorted(other, one).clamp(max=one.shape[2] - 1)
    both = (other.gather(2, place) == one).double().mean(2)
    return both.mean(1) if both.shape[1] else both.new_zeros(both.shape[0])


def donors(alike: Tensor, count: int) -> list[int]:
    """``count`` times the most alike pair i > j of ``alike`` [m, m] (ties: lower i, then lower j) makes j the donor of
    i, which then takes part no more; chains end at their last donor. Everybody else is its own donor."""
    left = alike.double().masked_fill(torch.ones_like(alike, dtype=torch.bool).triu(), -1.0)
    donor = list(range(len(alike)))
    for _ in range(count):
        i, j = divmod(int((left == left.max()).flatten().nonzero()[0]), len(alike))
        if left[i, j] < 0:
            break
        donor[i] = j
        left[i], left[:, i] = -1, -1
    return [_last(donor, index) for index in range(len(donor))]


def _last(donor: list[int], index: int) -> int:
    while donor[index] != index:
        index = donor[index]
    return index
