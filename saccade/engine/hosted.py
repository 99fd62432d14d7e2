"""Decode rows whose keys, tables, selection and attention are the host's while the device computes everything else
(LFPS as its paper runs it, section 3; docs/tiers.md).

At each layer the rows' queries, keys and values go down and results with their log-sum-exps come up, nothing else. The
device keeps each sequence's first keys, attends them meanwhile, and merges. What the CPU can know of a layer before its
queries are there, the candidates that score tables name, it finds while the device computes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from saccade.engine.host_calls import RequestRows, Setting
from saccade.engine.host_rows import FixedPlans, JoinedRows
from saccade.engine.hosted_memory import HostedMemory, first_of, lives_on_host
from saccade.engine.memory import SequenceMemory
from saccade.kv.blocks import BlockManager
from saccade.kv.host import HostTier
from saccade.kv.tier import LostKV, TierCounts, TierFull
from saccade.methods.base import Method
from saccade.methods.policy import Policy
from saccade.models.interface import LayerAttention
from saccade.ops import cpu_rows
from saccade.ops.down import Lane
from saccade.ops.merge import merge_state
from saccade.ops.reference import logits
from saccade.selection.pieces import read_blocks


def goes_to_host(pool: BlockManager, policy: Policy) -> bool:
    """Whether decode rows under ``policy`` leave the device: their method follows its keys, and what lies in host
    memory is attended there."""
    tier = None if pool.tiers is None else pool.tiers.tier
    if not isinstance(tier, HostTier) or tier.compute.mode != "host":
        return False
    return policy.decode.follows_kv and cpu_rows.stores(tier.k, "auto")


class Hosting:
    """Moves sequences to the host and back, for the steps of one worker."""

    def __init__(self, setting: Setting, plans: FixedPlans) -> None:
        self._setting, self._plans = replace(setting, backend="auto", fa4=False), plans
        self._lane: Lane | None = None

    def gather(self, rows: Iterable[RequestRows]) -> HostedRows | None:
        """Those of ``rows`` that decode there in this step; None where none do. Their sequences live there from now
        on; the others', if any did, live on the device."""
        found: list[tuple[RequestRows, HostedMemory]] = []
        for one in rows:
            pool = one.memory.kv.pool
            if not one.decodes or one.drafted or not goes_to_host(pool, one.scheduled.policy):
                continue
            try:
                found.append((one, lives_on_host(one.memory, partial(self._opened, one.method))))
            except TierFull as error:
                one.result.note(f"decode: the device served steps: {error}")
            except LostKV as error:
                one.failed(0, error)
        if not found:
            return None
        device = found[0][0].memory.kv.pool.storage.device
        if self._lane is None or self._lane.device != device:
            self._lane = Lane(device)
        return HostedRows(self._setting, self._plans, found, self._lane)

    def _opened(self, method: Method, memory: SequenceMemory) -> HostedMemory:
        return HostedMemory(memory, self._plans.summarized(method))


class HostedRows:
    """The rows ``found`` of one step, with the memories that stand for theirs. Rows are packed one after the other
    here: ``requests`` says whose they are."""

    def __init__(
        self, setting: Setting, plans: FixedPlans, found: Sequence[tuple[RequestRows, HostedMemory]], lane: Lane
    ) -> None:
        self._setting, self._lane = setting, lane
        self.requests = [rows for rows, _ in found]
        self._memories = [memory for _, memory in found]
        self._rows = [
            RequestRows(rows.scheduled, memory, rows.results, first) for first, (rows, memory) in enumerate(found)
        ]
        self._joined = JoinedRows(setting, plans, self._rows)
        self._first: tuple[Tensor, Tensor, Tensor] | None = None  # see first_of
        self._apart = torch.zeros(len(found), 1, dtype=torch.bool, device="cpu")  # whose first keys the device attends
        self._near: tuple[Tensor, Tensor] | None = None
        self._down = 0

    def begin(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, places: list[int]) -> None:
        """Send the rows ``places`` of ``q``, ``k``, ``v`` down, launch what the device attends of them, and find what is
        known of their candidates while it works."""
        where = _slice_of(places)
        q, k, v = q[:, where], k[:, where], v[:, where]
        self._down = self._lane.send(q, k, v)
        if layer == 0:
            self._joined.settle_fixed(q.new_empty(q.shape, device="cpu"), spec)
            counts = [0] * len(self._rows)
            for number, row in self._joined.fixed:
                counts[number] = 0 if row.state is None else row.state.apart
            self._first = first_of(self._memories, counts) if any(counts) else None
            self._apart = torch.tensor(counts, device="cpu")[:, None] > 0
        self._near = None if self._first is None else _attend_first(q, *self._first, layer, spec)
        if self._joined.fixed:
            self._joined.planned.foresee(layer, q.shape[0], self._setting.threads)

    def finish(self, layer: int, spec: LayerAttention, out: Tensor, places: list[int]) -> None:
        """Attend on the CPU, and write the rows' results to their ``places`` of ``out`` [heads, rows, head_dim]."""
        q, k, v = self._lane.wait()
        heads, count, width = q.shape
        here = self._lane.room("out", (count, heads, width), q.dtype)
        if self._joined.chosen:
            here.zero_()  # rows that fail leave nothing
        if spec.sinks is not None:
            spec = replace(spec, sinks=spec.sinks.cpu())
        self._joined.run(layer, q, k, v, spec, here.transpose(0, 1))
        up = here.nbytes
        result = self._lane.up(here)
        if self._near is not None:
            lse = self._lane.room("lse", (count, heads), torch.float32)
            lse.copy_(self._joined.planned.lse).masked_fill_(~self._apart, 0.0)
            up += lse.nbytes
            result, _ = merge_state(result, self._lane.up(lse), *self._near)
        out[:, _slice_of(places)] = result.transpose(0, 1)
        self._count(up)

    def _count(self, up: int) -> None:
        fixed, each = {number for number, _ in self._joined.fixed}, len(self._rows)
        for number, (rows, memory) in enumerate(zip(self._rows, self._memories)):
            hosted, result = memory.hosted_kv, rows.result
            if number in fixed:
                parts = self._joined.planned.touched(number)
            elif result.error is None:
                parts = int(read_blocks(result.calls[-1].used, hosted.pool.format.block_size).sum())
            else:
                parts = 0
            parts *= hosted.heads
            down = self._down // each, up // each
            hosted.attended(parts, *down)
            result.tiers = result.tiers or TierCounts()
            result.tiers.add(TierCounts(attended_on_host=parts, bytes_down=down[0], bytes_up=down[1]))
            result.asked_bytes += parts * hosted.part_bytes


def _attend_first(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, layer: int, spec: LayerAttention
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, rows, head_dim] over each row's first keys (see first_of): fp32 [rows, heads, head_dim], and their
    log-sum-exps, fp32 [rows, heads]; (0, -inf) for rows that have none here."""
    own = q.transpose(0, 1).unflatten(1, (k.shape[2], -1))  # [rows, kv_heads, group, head_dim]
    scores = logits(own.float(), k[layer].float(), spec.scale, spec.softcap) + hidden[:, None, None]
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).masked_fill_(torch.isneginf(lse)[..., None], 0.0)
    return (weights @ v[layer].float()).flatten(1, 2), lse.flatten(1, 2)


def _slice_of(places: list[int]) -> slice | list[int]:
    """Rows one after the other as a slice, which copies nothing."""
    if places == list(range(places[0], places[0] + len(places))):
        return slice(places[0], places[0] + len(places))
    return places
