"""One layer of a batched decode step as a reading (selection.readings) sees it, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.row_words import ConeNumbers
from saccade.ops.tallies import BESIDE, COVERED, ESTIMATED, SCORED, SEARCHES
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.batched_decode import Summaries
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.residency import Arrivals
from saccade.ops.triton.state_words import places

C = places(ConeNumbers)


class Stretches(Protocol):
    """Times stretches that do not nest."""

    def begin(self, name: str) -> None: ...

    def end(self) -> None: ...


class RuleRead(NamedTuple):
    """What a stopping rule let in of each [rows * units]: how many microbatches it ``used`` (int32) of so many blocks
    of ``size`` keys, the ``coverage`` that it believed in, and ``ranked`` blocks in all (int32; none where a row reads
    everything)."""

    used: Tensor
    microbatch: int
    size: int
    coverage: Tensor
    ranked: Tensor


class LayerRead(NamedTuple):
    """``out`` [rows, heads, head_dim] and ``lse`` float32 [rows, heads] of what was read: ``lists``, or without them
    and a rule everything. Where ``everything`` (bool [rows]) is given, its rows read all keys and their lists are
    empty. Float [rows], or [rows, m] to be added up: ``scored``, keys whose logits were computed to choose, per query
    head; ``searches``, query heads that looked for keys anew; ``estimated``, stand-ins for keys that were scored beside
    those that the reading's cost knows of. ``ruled``: under a rule, what it let in of ``ranking``: blocks that are read
    without a rank, those in order of rank, int32 [rows * units, m] each, and how many of the former count."""

    out: Tensor
    lse: Tensor
    lists: KeyLists | None
    everything: Tensor | None = None
    scored: Tensor | None = None
    searches: Tensor | None = None
    estimated: Tensor | None = None
    ruled: RuleRead | None = None
    ranking: tuple[Tensor, Tensor, Tensor] | None = None

    def counted(self, lengths: Tensor) -> LayerRead:
        """What :func:`tally` and rules' counts need of it: lists of all layers would fill the device. ``lengths`` takes
        the place of the rest."""
        lists = None if self.lists is None else replace(self.lists, starts=None, indices=lengths)
        return self._replace(out=lengths, lse=lengths, lists=lists, ranking=None)

    def of_row(self, row: int) -> list[Tensor]:
        """The entries that each unit read in one row, wherever they lie: for those who look on. None where it read
        everything."""
        if self.ranking is not None and self.ruled is not None:
            always, order, forced = self.ranking
            let_in = torch.minimum(self.ruled.used * self.ruled.microbatch, self.ruled.ranked)
            units = len(order) // len(self.out)
            entries = range(row * units, (row + 1) * units)
            return [torch.cat([always[at, : int(forced[at])], order[at, : int(let_in[at])]]) for at in entries]
        if self.lists is None:
            return []
        entries = range(row * self.lists.units, (row + 1) * self.lists.units)
        if self.lists.starts is not None:
            return [listed(self.lists, at) for at in entries]
        return [self.lists.indices[at, : int(_counts(self)[at])] for at in entries]


@dataclass(eq=False)
class LayerRows:
    """Rows that decode under readings of one form: ``q`` [rows, heads, head_dim] over ``pages``. ``words`` int64 [rows,
    w] and ``reals`` float64 [rows, r] are those of the rows' device states, ``cones`` float64 [rows, 4] the ConeNumbers
    of their windows, ``first``, ``second`` int32 and ``share`` float32 [rows] the numbers of the reading itself
    (selection.forms.Numbers). ``reach`` int32 [rows, kv_heads]: how far rules went in the last step. ``arrivals``:
    brings in what is read from host memory. What is said of a padding row (length 0) means nothing."""

    layer: int
    q: Tensor
    pages: Pages
    words: Tensor
    reals: Tensor
    cones: Tensor
    first: Tensor
    second: Tensor
    scale: float
    softcap: float | None = None
    summaries: Summaries | None = None
    watch: Stretches | None = None
    share: Tensor | None = None
    reach: Tensor | None = None
    arrivals: Arrivals | None = None

    @property
    def count(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.pages.k.shape[1]

    def hidden(self) -> Tensor:
        """int32 [rows, 2]: the keys (from, to) that each row's window hides; none where ``to`` is 0."""
        return hidden_keys(self.cones, self.pages.lengths)

    def attend(self, lists: KeyLists | None, pages: Pages | None = None) -> tuple[Tensor, Tensor]:
        """Attention over ``lists``: (out, lse). What comes before and after it is timed as selection."""
        arrivals, pages = self.arrivals, self.pages if pages is None else pages
        later = arrivals is not None and lists is not None and not arrivals.waits
        if arrivals is not None and later:
            pages = arrivals.find(pages)
        elif arrivals is not None:
            arrivals.bring(self.pages, lists)
        self.time("attention")
        done = attend_decode(self.q, pages, lists, scale=self.scale, softcap=self.softcap)
        self.time("selection")
        if arrivals is not None and lists is not None and later:
            arrivals.was_read(pages, lists)
        return done

    def attended(self, lists: KeyLists | None) -> LayerRead:
        """What comes of attention over ``lists`` alone."""
        return LayerRead(*self.attend(lists), lists)

    def time(self, name: str) -> None:
        """For who watches, the stretch ``name`` begins, and the one before ends."""
        if self.watch is not None:
            self.watch.end()
            self.watch.begin(name)


def hidden_keys(cones: Tensor, lengths: Tensor) -> Tensor:
    """See ``LayerRows.hidden``; ``lengths`` int32 [rows]."""
    hidden = torch.empty(len(lengths), 2, dtype=torch.int32, device=lengths.device)
    _hide[(len(lengths),)](cones, lengths, hidden, cones.stride(0), num_warps=1, **launched(lengths.device))
    return hidden


def tally(
    reads: Sequence[LayerRead], lengths: Tensor, heads: int, short: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """float64 [layers, rows, heads + BESIDE] (ops/tallies.py) of layers with one form, and float32 [layers, rows], the
    least that a rule believed it had covered, 1 without any. ``short`` (bool): what rules let in does not hold."""
    layers, rows = len(reads), len(lengths)
    done = torch.zeros(layers, rows, heads + BESIDE, dtype=torch.float64, device=lengths.device)
    least = torch.ones(layers, rows, device=lengths.device)
    ruled = [read.ruled for read in reads if read.ruled is not None]
    if ruled:
        ranked = torch.stack([one.ranked for one in ruled]).view(layers, rows, -1)
        if short is not None:
            ranked = torch.where(short, 0, ranked)
        used, covered = (
            torch.stack(part).view(ranked.shape) for part in zip(*((one.used, one.coverage) for one in ruled))
        )
        keys = torch.minimum(used * ruled[0].microbatch, ranked) * ruled[0].size
        done[..., heads + COVERED] = torch.where(ranked > 0, covered, 0.0).sum(2, dtype=torch.float64)
        least = torch.where(ranked > 0, covered, 1.0).amin(2)
    else:
        keys = torch.stack([_counts(read) for read in reads]).view(layers, rows, -1)
        whole = [read.everything for read in reads if read.everything is not None]
        if whole:
            keys = torch.where(torch.stack(whole)[:, :, None], lengths[:, None], keys)
    units = keys.shape[2]
    done[..., :heads].unflatten(2, (units, -1)).copy_(keys[..., None].expand(-1, -1, -1, heads // units))
    for at, name in ((SCORED, "scored"), (SEARCHES, "searches"), (ESTIMATED, "estimated")):
        parts = [part for read in reads if (part := getattr(read, name)) is not None]
        if parts:
            done[..., heads + at] = torch.stack(parts).view(layers, rows, -1).sum(2)
    return done, least


def _counts(read: LayerRead) -> Tensor:
    assert read.lists is not None
    assert read.lists.counts is not None
    return read.lists.counts


def listed(lists: KeyLists, entry: int) -> Tensor:
    """The entries of one list, wherever it lies: for those who look on."""
    assert lists.counts is not None
    assert lists.starts is not None
    count = int(lists.counts[entry])
    out = torch.empty(count, dtype=torch.int32, device=lists.counts.device)
    if count:
        _copy_list[(triton.cdiv(count, 1024),)](lists.indices, lists.starts[entry:], out, count, SPAN=1024)
    return out


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["indices", "starts"])
def _copy_list(indices, starts, out, count, SPAN: tl.constexpr):
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    tl.store(out + at, tl.load(indices + tl.load(starts) + at, mask=at < count, other=0), mask=at < count)


@triton.jit
def hidden_at(cones, row, cone_row, length):
    """The keys (from, to) that a row's window hides (``selection.Cone.start``), and nothing where it hides nothing."""
    cone = cones + row.to(tl.int64) * cone_row
    share, sinks, local = (
        tl.load(cone + C.share),
        tl.load(cone + C.sinks).to(tl.int32),
        tl.load(cone + C.local).to(tl.int32),
    )
    size = tl.maximum(tl.load(cone + C.grid).to(tl.int32), 1)
    seen = (length - 1) // size * size + 1
    most = tl.minimum(tl.floor(share * seen.to(tl.float64) + 1e-9).to(tl.int32), seen - local + 1)
    start = tl.maximum(most - 1, 0) // size * size
    hides = (length > 0) & (start > sinks)
    return tl.where(hides, sinks, 0), tl.where(hides, start, 0)


@triton.jit(do_not_specialize=["cone_row"], do_not_specialize_on_alignment=["cones", "lengths"])
def _hide(cones, lengths, hidden, cone_row, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0)
    low, high = hidden_at(cones, row, cone_row, tl.load(lengths + row))
    tl.store(hidden + 2 * row, low)
    tl.store(hidden + 2 * row + 1, high)
