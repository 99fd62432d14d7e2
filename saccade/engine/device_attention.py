"""The attention of a batched decode step: rows stored and attended group by group, each group as its form says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.engine.device_rows import Asked, RowBuffers
from saccade.engine.device_tap import Tap
from saccade.engine.device_watch import StepWatch
from saccade.kv.blocks import BlockManager
from saccade.kv.listed import SHORT
from saccade.kv.offers import Offers
from saccade.models.interface import LayerAttention
from saccade.ops.merge import merge_state
from saccade.ops.triton.batched_choice import choose_blocks
from saccade.ops.triton.batched_decode import Summaries, append_rows, band_lists, score_blocks
from saccade.ops.triton.batched_ranking import Ranked, rank_rows
from saccade.ops.triton.batched_rows import LayerRead, LayerRows, tally
from saccade.ops.triton.decode import KeyLists, Pages, attend_decode
from saccade.ops.triton.dispatch import BLOCK_SIZES
from saccade.ops.triton.few_rows import attend_rows
from saccade.ops.triton.progressive import MOST_KEYS, Progress, Rule, attend_progressive
from saccade.ops.triton.residency import bring_in, bring_in_ranked, follow_reach
from saccade.selection.plan import (
    LABELS,
    BestBlocks,
    DevicePlan,
    Ends,
    Everything,
    OwnReading,
    PlanSpec,
    RankedBlocks,
    Reading,
    blocks_of,
)

SUMMARIES = ("cuboid", "minmax")  # that the scores' kernel reads
GUESSING = ("moments", LABELS)  # by which kernels guess what blocks weigh, to rank them


def why_not(plan: DevicePlan, spec: PlanSpec) -> str | None:
    """What no kernel serves of ``plan`` on such a model; None where kernels serve all of it."""
    for reading in set(plan.layers):
        if isinstance(reading, OwnReading) and (reason := reading.why_not(spec)) is not None:
            return reason
    choice, kv_heads = plan.blocks, spec.kv_heads
    if not isinstance(choice, BestBlocks | RankedBlocks):
        return None
    if choice.size not in BLOCK_SIZES:
        return f"the kernels read blocks of {', '.join(map(str, BLOCK_SIZES))} keys, not of {choice.size}"
    if choice.summary not in SUMMARIES and not (isinstance(choice, RankedBlocks) and choice.summary in GUESSING):
        return f"the kernels score the summaries {' and '.join(SUMMARIES)}, not {choice.summary}"
    if kv_heads % choice.units:
        return f"the kernels choose for whole KV heads, not for {choice.units} units of {kv_heads} of them"
    if isinstance(choice, RankedBlocks):
        if choice.units != kv_heads:
            return "the kernels stop for each KV head by itself"
        if choice.microbatch * choice.size > MOST_KEYS:
            return f"a microbatch is at most {MOST_KEYS} keys, not {choice.microbatch} blocks of {choice.size}"
    return None


@dataclass(frozen=True)
class Group:
    """Rows ``first .. first + rows - 1`` of a step decode under plans of one form, ``each`` tokens a row."""

    form: tuple[Reading, ...]
    first: int
    rows: int

    @property
    def each(self) -> int:
        reading = self.form[0]
        return reading.rows if isinstance(reading, Everything) else 1

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
        self._blocks = [blocks_of(group.form) for group in groups]
        self._ruled: list[dict[int, tuple[Progress, Tensor]]] = [{} for _ in groups]  # by layer: and counts of ranks
        self._read: list[dict[int, LayerRead]] = [{} for _ in groups]  # by layer: what readings of their own did

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        """See AttentionContext: q [heads, tokens, head_dim], of one sequence after the other."""
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        parts = [self._attend(number, layer, q, k, v, spec) for number in range(len(self.groups))]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.transpose(0, 1)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError  # no decode row is frozen

    def finish(self) -> None:
        """Add what rules did to the rows' counts, at the very end: a step that fails before has counted nothing."""
        rules, words = self.buffers.rules, self.buffers.own
        for group, read in zip(self.groups, self._read):
            for layers in _stretches(sorted(read)):
                counts = tally([read[layer] for layer in layers], self.lengths[group.slice], words.heads)
                words.tallies[layers[0] : layers[-1] + 1, group.slice] += counts
        for group, choice, ruled in zip(self.groups, self._blocks, self._ruled):
            if not isinstance(choice, RankedBlocks):
                continue
            for layers in _stretches(sorted(ruled)):
                done = [ruled[layer] for layer in layers]
                used = torch.stack([progress.used for progress, _ in done])
                covered = torch.stack([progress.coverage for progress, _ in done])
                ranked = torch.stack([counts[1] for _, counts in done])  # blocks; none where a row reads everything
                if self.offers is not None:  # nothing that did not hold
                    ranked = torch.where((self.offers.head[:, SHORT] > 0).any(), 0, ranked)
                keys = torch.minimum(used * choice.microbatch, ranked).to(torch.int64) * choice.size
                where, shape = (slice(layers[0], layers[-1] + 1), group.slice), (len(layers), group.rows, -1)
                rules.keys[where] += keys.view(shape)
                rules.covered[where] += torch.where(ranked > 0, covered, 0.0).view(shape)
                least = rules.least[where]
                least.copy_(torch.minimum(least, torch.where(ranked > 0, covered, 1.0).view(shape)))

    def _attend(self, number: int, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        group, watch = self.groups[number], self.watch
        rows, reading, choice = group.slice, group.form[layer], self._blocks[number]
        q, k, v, numbers = q[group.tokens], k[group.tokens], v[group.tokens], self.buffers
        limits = None if self.limits is None else self.limits[group.tokens]
        pages = Pages(
            self.storage.k, self.storage.v, self.buffers.tables[layer, rows], self.lengths[rows], self.longest
        )
        summaries = None
        if choice is not None and not (isinstance(choice, RankedBlocks) and choice.labelled):
            # Also where the layer itself reads everything: its summaries stay complete.
            summaries = Summaries(self.buffers.pointers[layer, rows], choice.size, choice.summary)
        append_rows(k, v, pages, summaries, limits)
        if limits is not None:
            if self.asked is not None:
                self.asked.take(layer, group.tokens, q, spec)
            out, lse = attend_rows(q, pages, limits, scale=spec.scale, softcap=spec.softcap)
            return _with_sinks(out, lse, spec)
        if isinstance(reading, OwnReading):
            return self._own(number, layer, q, pages, summaries, reading, spec)
        first, second = numbers.first[layer, rows], numbers.second[layer, rows]
        lists: KeyLists | None = None
        ranking: Ranked | None = None
        progress: Progress | None = None
        if watch is not None:
            watch.begin("selection")
        if isinstance(reading, Ends):
            lists = band_lists(pages, first, second, reading.longest)
        elif isinstance(reading, BestBlocks):
            assert summaries is not None
            lists = choose_blocks(score_blocks(q, pages, summaries, reading), pages, reading, first, second)
        elif isinstance(reading, RankedBlocks):
            words = numbers.own.words[layer, rows]
            ranking = rank_rows(q, pages, summaries, words, reading, second, spec.scale, spec.softcap)
        if self.offers is not None:
            where = self.pool, self.offers, layer, self.buffers.logical[rows], pages
            if ranking is None:
                bring_in(*where, lists)
            elif isinstance(reading, RankedBlocks):
                bring_in_ranked(*where, ranking[:3], reading.size)
        if watch is not None:
            watch.end()
            watch.begin("attention")
        if ranking is None:
            out, lse = attend_decode(q, pages, lists, scale=spec.scale, softcap=spec.softcap)
        else:
            assert isinstance(reading, RankedBlocks)
            reach = numbers.reach[layer, rows]
            progress = _progress(q, pages, ranking, reading, numbers.share[layer, rows], reach, spec)
            self._ruled[number][layer] = progress, ranking.counts
            if self.offers is not None:
                follow_reach(self.offers, layer, progress.used, reading.microbatch, ranking.counts[1])
            out, lse = progress.out, progress.lse
        out = _with_sinks(out, lse, spec)
        if self.tap is not None:
            self.tap.take(layer, rows, q, out, lse, spec)
        if watch is not None:
            watch.end()
            watch.called(layer, group.first, q, out, spec, lists, ranking and ranking[:3], progress)
        return out

    def _own(
        self,
        number: int,
        layer: int,
        q: Tensor,
        pages: Pages,
        summaries: Summaries | None,
        reading: OwnReading,
        spec: LayerAttention,
    ) -> Tensor:
        """Attention of a group whose method brings its kernels."""
        group, words, watch = self.groups[number], self.buffers.own, self.watch
        rows = group.slice
        if watch is not None:
            watch.begin("selection")
        read: LayerRead = reading.read(
            LayerRows(
                layer,
                q,
                pages,
                words.words[layer, rows],
                words.reals[layer, rows],
                words.cones[layer, rows],
                self.buffers.first[layer, rows],
                self.buffers.second[layer, rows],
                spec.scale,
                spec.softcap,
                summaries,
                watch,
            )
        )
        # Of what it read only the counts are needed any more: lists of all layers would fill the device.
        short = replace(read.lists, starts=None, indices=pages.lengths)
        self._read[number][layer] = read._replace(out=pages.lengths, lse=pages.lengths, lists=short)
        out = _with_sinks(read.out, read.lse, spec)
        if self.tap is not None:
            self.tap.take(layer, rows, q, out, read.lse, spec)
        if watch is not None:
            watch.end()
            watch.called(layer, group.first, q, out, spec, read.lists, None, None, read.everything)
        return out


def _progress(
    q: Tensor,
    pages: Pages,
    ranking: Ranked,
    reading: RankedBlocks,
    epsilon: Tensor,
    reach: Tensor,
    spec: LayerAttention,
) -> Progress:
    rule = Rule(reading.epsilon, reading.microbatch, reading.rest, reading.stop, reading.margin)
    return attend_progressive(
        q,
        pages,
        ranking.always,
        ranking.order,
        reading.size,
        rule,
        scale=spec.scale,
        softcap=spec.softcap,
        counts=ranking.counts,
        epsilon=epsilon,
        before=reach,
        guesses=ranking.guesses,
    )


def _stretches(layers: list[int]) -> list[list[int]]:
    """Rising numbers as runs without gaps."""
    runs: list[list[int]] = []
    for layer in layers:
        if not runs or runs[-1][-1] != layer - 1:
            runs.append([])
        runs[-1].append(layer)
    return runs


def _with_sinks(out: Tensor, lse: Tensor, spec: LayerAttention) -> Tensor:
    """``out`` [rows, heads, head_dim] after a layer's extra logits without values: a merge with an empty-valued
    state."""
    if spec.sinks is None:
        return out
    return merge_state(out, lse, torch.zeros_like(out), spec.sinks.to(lse.dtype).expand_as(lse))[0]
