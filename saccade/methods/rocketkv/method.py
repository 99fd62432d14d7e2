"""RocketKV: evict once, coarsely, when a prefill ends; then choose blocks of what is left in every step, by some of the
query's channels and the blocks' extremes (Behnam et al., 2025; docs/algorithms.md 6.22).

The first stage is SnapKV with a maximum over neighbours, wide enough to keep passages whole. The second is the paper's
hybrid attention: reduced along the sequence (a block's channel-wise minimum and maximum stand for it) and along the
head dimension (the channels with the most of the group's query count alone). Definitions are those of the authors'
code, github.com/NVlabs/RocketKV; the sizes are TensorRT-LLM's defaults. ``budget`` derives them from one number as the
authors' evaluation does. Differences from that code:

* a group's blocks are read whole, ties to the lower one (the code cuts the last block at its budget of keys);
* room for the answer is not taken from what the prompt may keep: how long it gets is not known here;
* their variant for several turns, which hides keys for a turn instead of evicting them, is not here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Method, Query
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.eviction import Kept, SnapKV
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.host_state import HostState
from saccade.methods.options import require, require_whole
from saccade.methods.rocketkv.recorded import KeptBlocks, RecordedBlocks
from saccade.ops.reference import soft_capped
from saccade.ops.scores import top_places
from saccade.selection import Selection, Tokens
from saccade.selection.csr import offsets_of_lists
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan

SIZES = ("capacity", "keys", "block_size", "channels")  # that a budget stands for
TINY = 1e-30  # of a query without any weight in its channels


@dataclass
class RocketKept(Kept):
    """Of each unit's kept keys and those since, in blocks of ``size`` by their order: the channel-wise least and
    greatest of every full block, one [blocks, head_dim] a unit, in the keys' dtype. ``keys`` are read in a step, chosen
    by ``channels`` channels."""

    replaced: ClassVar[frozenset[str]] = frozenset({"positions", "low", "high"})

    low: list[Tensor]
    high: list[Tensor]
    size: int
    keys: int
    channels: int

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        super().fit(sizes, fitting)
        fitting.within("size", self.size, 1, 2**31)
        fitting.within("keys", self.keys, 1, 2**31)
        fitting.within("channels", self.channels, 1, sizes.head_dim)
        units = len(self.positions)
        fitting.require(len(self.low) == len(self.high) == units, f"has blocks of {len(self.low)} units, not {units}")
        for low, high, count in zip(self.low, self.high, self.counts(sizes.length)):
            blocks = len(fitting.tensor("low", low, sizes.dtype, None, sizes.head_dim))
            fitting.tensor("high", high, sizes.dtype, blocks, sizes.head_dim)
            fitting.within("blocks", blocks, 0, count // self.size)

    @property
    def reach(self) -> int:
        """Keys that a step reads, in whole blocks."""
        return -(-self.keys // self.size) * self.size

    def places(self, unit: int, start: int, stop: int) -> Tensor:
        """Positions of entries ``start .. stop - 1`` of a unit's list, int64."""
        kept = self.positions[unit]
        later = torch.arange(max(start - kept.numel(), 0), max(stop - kept.numel(), 0), device=kept.device)
        return torch.cat([kept[start:stop], self.length + later])

    def counts(self, length: int) -> list[int]:
        """How many keys each unit has where the sequence holds ``length``."""
        return [kept.numel() + length - self.length for kept in self.positions]

    def extend(self, kv: KVView, length: int) -> None:
        """Take in the blocks that are full where the sequence holds ``length`` tokens."""
        group = len(self.positions) // kv.kv_heads
        for unit, count in enumerate(self.counts(length)):
            done, full = self.low[unit].shape[0], count // self.size
            if full > done:
                keys = kv.take(self.places(unit, done * self.size, full * self.size), unit // group)[0]
                low, high = torch.aminmax(keys.unflatten(0, (-1, self.size)), dim=1)
                self.low[unit] = torch.cat([self.low[unit], low])
                self.high[unit] = torch.cat([self.high[unit], high])

    def extremes(self, kv: KVView, counts: list[int]) -> tuple[Tensor, Tensor]:
        """Of every block, the partial last one too: fp32 [units, blocks, head_dim] twice; blocks that a unit lacks hold
        anything."""
        group, low, high = len(counts) // kv.kv_heads, [], []
        for unit, count in enumerate(counts):
            full = count // self.size
            parts = [(self.low[unit][:full], self.high[unit][:full])]
            if count % self.size:
                keys = kv.take(self.places(unit, full * self.size, count), unit // group)[0]
                parts.append(torch.aminmax(keys[None], dim=1))
            low.append(torch.cat([part[0] for part in parts]))
            high.append(torch.cat([part[1] for part in parts]))
        padded = [torch.nn.utils.rnn.pad_sequence(one, batch_first=True).float() for one in (low, high)]
        return padded[0], padded[1]

    def truncate(self, length: int) -> None:
        super().truncate(length)
        for unit, count in enumerate(self.counts(length)):
            self.low[unit] = self.low[unit][: count // self.size]
            self.high[unit] = self.high[unit][: count // self.size]


@dataclass(frozen=True)
class RocketKV(SnapKV):
    """When a prefill leaves more than ``capacity`` keys, keep the last ``window`` ones and those before them whose
    ``kernel`` neighbours hold the one with the most weight from the last ``window`` rows. Then every step reads
    ``keys`` of what is left, in blocks of ``block_size`` kept keys, chosen by the ``channels`` (a share of them) that
    are greatest in the group's query. ``budget``: all four by the authors' rule, from the keys that a step may be worth
    and the context (:meth:`sized`)."""

    name: ClassVar[str] = "rocketkv"
    paper: ClassVar[str] = "RocketKV, arXiv:2502.14051"

    capacity: int = 2048
    window: int = 32
    kernel: int = 63
    keys: int = 256
    block_size: int = 4
    channels: float = 1.0
    budget: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("keys", self.keys, 1)
        require_whole("block_size", self.block_size, 1)
        share = self.channels
        ok = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= 1
        require(ok, "channels", share, "a share above 0 and at most 1 of the channels")
        if self.budget is not None:
            require_whole("budget", self.budget, 2)
            default = RocketKV()
            given = [name for name in SIZES if getattr(self, name) != getattr(default, name)]
            if given:
                raise PolicyError(
                    f"budget={self.budget} stands for {', '.join(SIZES)} together; leave {given[0]} out, or budget"
                )

    def sized(self, context: int, head_dim: int) -> tuple[RocketKV, int]:
        """The method with the sizes that it has for ``context`` tokens, and its channels.

        With a budget b: of the compression c = context / b the first stage gets c^a, a = min(0.2 + 0.06 log2 c, 0.8),
        which leaves capacity = context / c^a; b / 2 keys are read, found by b / 2 keys' worth of extremes: with c' =
        capacity / b in blocks of ceil(sqrt(c')), by a share block / c' of the channels."""
        if self.budget is None:
            return self, max(1, int(self.channels * head_dim))
        sized, rest = _sized(self, context)
        return sized, max(1, int(head_dim * sized.block_size / rest))

    def begin(self, segment: Chunk) -> RocketKept:
        shape = segment.shape
        sized, channels = self.sized(shape.k_len, segment.q.shape[-1])
        kept = super(RocketKV, sized).begin(segment)
        low = [segment.q.new_empty(0, segment.q.shape[-1], dtype=segment.kv.dtype) for _ in kept.positions]
        state = RocketKept(
            kept.positions, kept.length, low, list(low), size=sized.block_size, keys=sized.keys, channels=channels
        )
        state.extend(segment.kv, shape.k_len)
        return state

    def pooled(self, votes: Tensor) -> Tensor:
        return torch.nn.functional.max_pool1d(votes[None], self.kernel, 1, self.kernel // 2)[0]

    def select_decode(self, query: Query, state: Any) -> Selection:
        shape, n = query.shape, query.shape.k_len
        counts, size = state.counts(n), state.size
        state.extend(query.kv, n)
        wanted = state.reach // size
        blocks = [-(-count // size) for count in counts]
        if max(blocks) <= wanted:
            return state.select(shape)
        query.cost.estimated += max(blocks)
        scores = self._scores(query, state, counts, *state.extremes(query.kv, counts))
        lists = []
        for unit, (count, has) in enumerate(zip(counts, blocks)):
            chosen = top_places(scores[unit : unit + 1, :has], min(wanted, has))[0]
            entries = (chosen[:, None] * size + torch.arange(size, device=chosen.device)).flatten()
            places = state.places(unit, 0, count)
            lists.append(places[entries[entries < count]].to(torch.int32))
        return Tokens(shape, offsets_of_lists(lists, lists[0].device), torch.cat(lists))

    def host_state(self, opening: Opening) -> HostState | None:
        return Method.host_state(self, opening)

    def whole_upto(self, opening: Opening) -> int:
        states = opening.states
        if any(state is None or not state.is_whole for state in states):
            return 0
        return min(state.reach for state in states)

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        return DevicePlan.alike(self, spec, KeptBlocks.of(self, spec))

    def device_state(self, opening: Opening) -> DeviceState:
        return RecordedBlocks(opening)

    def _scores(self, query: Query, state: RocketKept, counts: list[int], low: Tensor, high: Tensor) -> Tensor:
        """What a key of each block is estimated to weigh, meaned over the unit's query heads: fp32 [units, blocks]."""
        units, size = len(counts), state.size
        q = query.q[:, 0].float().unflatten(0, (units, -1))  # [U, g, d]
        which = top_places(q.abs().sum(1), state.channels)[:, None]  # [U, 1, r]
        part = q.gather(2, which.expand(-1, q.shape[1], -1))
        low, high = (one.gather(2, which.expand(-1, one.shape[1], -1)) for one in (low, high))
        toward = torch.where(part.sum(1, keepdim=True) > 0, high, low)  # [U, blocks, r]
        share = part.abs().sum(2) / q.abs().sum(2).clamp(min=TINY)
        logits = part @ toward.transpose(1, 2) * (query.scale / share.clamp(min=TINY).sqrt())[..., None]
        logits = soft_capped(logits, query.softcap)
        held = torch.tensor(counts, device=q.device)[:, None] - size * torch.arange(low.shape[1], device=q.device)
        keys = held.clamp(0, size)[:, None]  # of each block: the last one may be short
        total = torch.logsumexp(logits + keys.log(), 2, keepdim=True)
        return torch.exp(logits - total).masked_fill(keys == 0, -torch.inf).mean(1)


@lru_cache(maxsize=4096)  # asked again at each step, for its report
def _sized(method: RocketKV, context: int) -> tuple[RocketKV, float]:
    """``method`` with sizes in place of its budget, and how many budgets of keys the first stage leaves."""
    assert method.budget is not None
    budget = min(method.budget, context)
    ratio = max(1.0, context / max(budget, 1))
    capacity = int(context / ratio ** min(0.2 + 0.06 * math.log2(ratio), 0.8))
    rest = max(1.0, capacity / max(budget, 1))
    size = math.ceil(math.sqrt(rest))
    size = size if size <= rest else 1
    left = max(capacity, method.window + 1)
    return replace(method, budget=None, capacity=left, keys=max(1, budget // 2), block_size=size), rest
