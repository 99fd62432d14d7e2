"""The attention of a batched decode step: rows stored and attended group by group, each group as its plan says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.engine.batched_plan import BestBlocks, Ends, Plan
from saccade.engine.batched_rows import RowBuffers
from saccade.kv.pool import BlockPool
from saccade.models.interface import LayerAttention
from saccade.ops.merge import merge_state
from saccade.ops.triton.batched_decode import PageChoice, Summaries, append_rows, band_lists, score_blocks
from saccade.ops.triton.batched_rank import choose_blocks, rank_blocks, ranked_keys
from saccade.ops.triton.decode import Pages, attend_decode
from saccade.ops.triton.progressive import Rule, attend_progressive


@dataclass(frozen=True)
class Group:
    """Rows ``first .. first + rows - 1`` of a step decode under one plan."""

    plan: Plan
    first: int
    rows: int


class StepAttention:
    """The attention context (models.interface.AttentionContext) of one batched step over ``buffers``, whose rows have
    at most ``longest`` keys."""

    def __init__(self, groups: tuple[Group, ...], buffers: RowBuffers, pool: BlockPool, longest: int) -> None:
        self.groups, self.buffers, self.pool, self.longest = groups, buffers, pool, longest
        self.lengths = buffers.numbers[2].to(torch.int32)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        """See AttentionContext: q [heads, rows, head_dim], one row a sequence."""
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        with torch._C.DisableTorchFunction():  # see ops.triton: an ambient device costs at every attribute
            parts = [self._attend(group, layer, q, k, v, spec) for group in self.groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.transpose(0, 1)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError  # no decode row is frozen

    def _attend(self, group: Group, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        rows = slice(group.first, group.first + group.rows)
        reading, blocks = group.plan.layers[layer], group.plan.blocks
        q = q[rows]
        pages = Pages(self.pool.k, self.pool.v, self.buffers.tables[layer, rows], self.lengths[rows], self.longest)
        summaries = None
        if blocks is not None:  # also where the layer itself reads everything: its summaries stay complete
            summaries = Summaries(self.buffers.pointers[layer, rows], blocks.choice.size, blocks.choice.kind)
        append_rows(k[rows], v[rows], pages, summaries)
        lists = None
        if isinstance(reading, Ends):
            lists = band_lists(pages, reading.sinks, reading.window)
        elif isinstance(reading, BestBlocks):
            assert summaries is not None
            scores = score_blocks(q, pages, summaries, reading.choice)
            if reading.rule is not None:
                return self._progressive(q, pages, scores, reading.choice, reading.rule, layer, rows, spec)
            lists = choose_blocks(scores, pages, reading.choice)
        out, lse = attend_decode(q, pages, lists, scale=spec.scale, softcap=spec.softcap)
        return _with_sinks(out, lse, spec)

    def _progressive(
        self,
        q: Tensor,
        pages: Pages,
        scores: Tensor,
        choice: PageChoice,
        rule: Rule,
        layer: int,
        rows: slice,
        spec: LayerAttention,
    ) -> Tensor:
        always, order, counts = rank_blocks(scores, pages, choice)
        out, lse, used, _ = attend_progressive(
            q, pages, always, order, choice.size, rule, scale=spec.scale, softcap=spec.softcap, counts=counts
        )
        read = ranked_keys(used, counts, choice.size, rule.microbatch)
        self.buffers.read[layer, rows] += read.view(-1, self.pool.kv_heads)
        return _with_sinks(out, lse, spec)


def _with_sinks(out: Tensor, lse: Tensor, spec: LayerAttention) -> Tensor:
    """``out`` [rows, heads, head_dim] after a layer's extra logits without values: a merge with an empty-valued
    state."""
    if spec.sinks is None:
        return out
    return merge_state(out, lse, torch.zeros_like(out), spec.sinks.to(lse.dtype).expand_as(lse))[0]
