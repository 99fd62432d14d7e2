"""The attention of a batched decode step: rows stored and attended group by group, each group as its form says."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from saccade.engine.device.rows import Asked, RowBuffers
from saccade.engine.device.tap import Tap
from saccade.engine.device.watch import StepWatch
from saccade.kv.blocks import BlockManager
from saccade.kv.listed import SHORT
from saccade.kv.offers import Offers
from saccade.models.interface import LayerAttention
from saccade.ops.merge import merge_state
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_decode import Summaries, append_rows
from saccade.ops.triton.batched_reading import read_rows
from saccade.ops.triton.batched_rows import LayerRead, LayerRows, tally
from saccade.ops.triton.few_rows import attend_rows
from saccade.ops.triton.residency import Arrivals, Read, bring_later
from saccade.selection.plan import stored
from saccade.selection.readings import Reading


@dataclass(frozen=True)
class Group:
    """Rows ``first .. first + rows - 1`` of a step decode under plans of one form, ``each`` tokens a row."""

    form: tuple[Reading, ...]
    first: int
    rows: int

    @property
    def each(self) -> int:
        return self.form[0].each

    @property
    def tokens(self) -> slice:
        """Of a step whose rows have as many tokens each."""
        return slice(self.first * self.each, (self.first + self.rows) * self.each)

    @property
    def slice(self) -> slice:
        return slice(self.first, self.first + self.rows)


class DeviceAttention:
    """The attention context (models.interface.AttentionContext) of one batched step over ``buffers``, whose rows have
    at most ``longest`` keys. ``watch`` sees every call. With ``offers`` blocks may lie in host memory: what a layer
    reads is brought in. ``tap`` takes what audits look at, ``asked`` what methods learn from in a prefill."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        buffers: RowBuffers,
        pool: BlockManager,
        longest: int,
        watch: StepWatch | None = None,
        offers: Offers | None = None,
        tap: Tap | None = None,
        asked: Asked | None = None,
    ) -> None:
        self.groups, self.buffers, self.longest, self.watch = groups, buffers, longest, watch
        self.pool, self.storage, self.offers, self.tap, self.asked = pool, pool.storage, offers, tap, asked
        self.lengths = buffers.resolve(pool, groups[-1].slice.stop, longest)
        several = groups[0].each > 1
        self.limits = buffers.seen[: groups[-1].tokens.stop].to(torch.int32) if several else None
        if offers is not None:
            offers.begin()
        self._kept = [stored(group.form) for group in groups]
        self._read: list[dict[int, LayerRead]] = [{} for _ in groups]  # by layer: what is counted here

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        """See AttentionContext: q [heads, tokens, head_dim], of one sequence after the other."""
        q = q.transpose(0, 1)
        if k is not None and v is not None:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        later: list[Read] = []
        parts = [self._attend(number, layer, q, k, v, spec, later) for number in range(len(self.groups))]
        if self.offers is not None:
            bring_later(self.pool, self.offers, layer, later)
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.transpose(0, 1)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError  # no decode row is frozen

    def finish(self) -> None:
        """Add what readings did to the rows' counts, at the very end: a step that fails before has counted nothing."""
        if self.offers is not None:
            self.offers.join()
        own, short = self.buffers.own, None if self.offers is None else (self.offers.head[:, SHORT] > 0).any()
        for group, read in zip(self.groups, self._read):
            for layers in _stretches(sorted(read), group.form):
                where, done = (slice(layers[0], layers[-1] + 1), group.slice), [read[layer] for layer in layers]
                counts, least = tally(done, self.lengths[group.slice], own.heads, short)
                own.tallies[where] += counts
                own.least[where].copy_(torch.minimum(own.least[where], least))

    def _attend(
        self,
        number: int,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: LayerAttention,
        later: list[Read],
    ) -> Tensor:
        group, watch, buffers, kept = self.groups[number], self.watch, self.buffers, self._kept[number]
        rows, reading = group.slice, group.form[layer]
        q = q[group.tokens]
        limits = None if self.limits is None else self.limits[group.tokens]
        held, tables = self.storage, buffers.tables[self.pool.reads[layer], rows]
        pages = Pages(held.k, held.v, tables, self.lengths[rows], self.longest, value_dim=held.format.value_dim)
        # Also where the layer itself reads everything: its summaries stay complete.
        summaries = None if kept is None else Summaries(buffers.pointers[layer, rows], kept.size, kept.summary)
        if k is not None and v is not None:  # else the layer that it reads has stored them
            append_rows(k[group.tokens], v[group.tokens], pages, summaries, limits)
        if limits is not None:
            if self.asked is not None:
                self.asked.take(layer, group.tokens, q, spec)
            window = None if reading.ends is None else reading.ends[1]
            out, lse = attend_rows(q, pages, limits, scale=spec.scale, softcap=spec.softcap, window=window)
            return _with_sinks(out, lse, spec)
        if watch is not None:
            watch.begin("selection")
        own, offers = buffers.own, self.offers
        read = read_rows(
            reading,
            LayerRows(
                layer,
                q,
                pages,
                own.words[layer, rows],
                own.reals[layer, rows],
                own.cones[layer, rows],
                buffers.first[layer, rows],
                buffers.second[layer, rows],
                spec.scale,
                spec.softcap,
                summaries,
                watch,
                buffers.share[layer, rows],
                buffers.reach[layer, rows],
                None if offers is None else Arrivals(self.pool, offers, layer, buffers.logical[rows], later),
            ),
        )
        if reading.ruled or not reading.listed:
            self._read[number][layer] = read.counted(pages.lengths)
        out = _with_sinks(read.out, read.lse, spec)
        if self.tap is not None:
            self.tap.take(layer, rows, q, out, read.lse, spec)
        if watch is not None:
            watch.end()
            watch.called(layer, group.first, q, out, spec, read)
        return out


def _stretches(layers: list[int], form: tuple[Reading, ...]) -> list[list[int]]:
    """Rising numbers as runs without gaps, of layers with one form each."""
    runs = groupby(enumerate(layers), lambda one: (one[1] - one[0], form[one[1]]))
    return [[layer for _, layer in run] for _, run in runs]


def _with_sinks(out: Tensor, lse: Tensor, spec: LayerAttention) -> Tensor:
    """``out`` [rows, heads, head_dim] after a layer's extra logits without values: a merge with an empty-valued
    state."""
    if spec.sinks is None:
        return out
    return merge_state(out, lse, torch.zeros_like(out), spec.sinks.to(lse.dtype).expand_as(lse))[0]
