"""One layer of a batched decode step as a reading of a method's own sees it (selection.plan.OwnReading)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.batched_decode import Summaries
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.decode import KeyLists, Pages, attend_decode


class Stretches(Protocol):
    """Times stretches that do not nest."""

    def begin(self, name: str) -> None: ...

    def end(self) -> None: ...


class LayerRead(NamedTuple):
    """``out`` [rows, heads, head_dim] and ``lse`` float32 [rows, heads] of what was read, ``lists``. Where
    ``everything`` (bool [rows]) is given, its rows read all keys and their lists are empty. Float [rows], or [rows, m]
    to be added up: ``scored``, keys whose logits were computed to choose, per query head; ``searches``, query heads
    that looked for keys anew; ``estimated``, stand-ins for keys that were scored beside those that the reading's cost
    knows of."""

    out: Tensor
    lse: Tensor
    lists: KeyLists
    everything: Tensor | None = None
    scored: Tensor | None = None
    searches: Tensor | None = None
    estimated: Tensor | None = None


@dataclass(eq=False)
class LayerRows:
    """Rows that decode under readings of one form: ``q`` [rows, heads, head_dim] over ``pages``. ``words`` int64 [rows,
    w] and ``reals`` float64 [rows, r] are those of the rows' device states, ``cones`` float64 [rows, 4] share, sinks,
    local and grid of their windows (selection.Cone; all 0: none), ``first`` and ``second`` int32 [rows] the numbers of
    the reading itself (selection.plan.Numbers). What is said of a padding row (length 0) means
    nothing."""

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
        if self.watch is not None:
            self.watch.end()
            self.watch.begin("attention")
        done = attend_decode(
            self.q, self.pages if pages is None else pages, lists, scale=self.scale, softcap=self.softcap
        )
        if self.watch is not None:
            self.watch.end()
            self.watch.begin("selection")
        return done


def hidden_keys(cones: Tensor, lengths: Tensor) -> Tensor:
    """See ``LayerRows.hidden``; ``lengths`` int32 [rows]."""
    hidden = torch.empty(len(lengths), 2, dtype=torch.int32, device=lengths.device)
    _hide[(len(lengths),)](cones, lengths, hidden, cones.stride(0), num_warps=1, **launched(lengths.device))
    return hidden


def tally(reads: Sequence[LayerRead], lengths: Tensor, heads: int) -> Tensor:
    """float64 [layers, rows, heads + 3]: keys that each query head read, scored, searches, estimated. ``reads`` are of
    layers with one form."""
    layers, rows, units = len(reads), len(lengths), reads[0].lists.units
    done = torch.zeros(layers, rows, heads + 3, dtype=torch.float64, device=lengths.device)
    keys = torch.stack([_counts(read) for read in reads]).view(layers, rows, units, 1)
    whole = [read.everything for read in reads if read.everything is not None]
    if whole:
        keys = torch.where(torch.stack(whole)[:, :, None, None], lengths[:, None, None], keys)
    done[..., :heads].unflatten(2, (units, -1)).copy_(keys.expand(-1, -1, -1, heads // units))
    for at, name in ((heads, "scored"), (heads + 1, "searches"), (heads + 2, "estimated")):
        parts = [part for read in reads if (part := getattr(read, name)) is not None]
        if parts:
            done[..., at] = torch.stack(parts).view(layers, rows, -1).sum(2)
    return done


def _counts(read: LayerRead) -> Tensor:
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


def kept_lists(rows: LayerRows, units: int) -> KeyLists:
    """The lists that rows keep for good. Words: the address of int32 [units, m], m, the address of int64 [units], how
    many entries count at length ``since``, and ``since``; a list gains an entry with each key from there on."""
    device = rows.q.device
    starts = torch.empty(rows.count * units, dtype=torch.int64, device=device)
    counts = torch.empty(rows.count * units, dtype=torch.int32, device=device)
    _kept_lists[(rows.count,)](
        rows.words,
        rows.pages.lengths,
        starts,
        counts,
        rows.words.stride(0),
        UNITS=units,
        PADDED=triton.next_power_of_2(units),
        num_warps=1,
        **launched(device),
    )
    # Lists lie anywhere: their starts count from some tensor of the device.
    return KeyLists(starts, counts, rows.pages.lengths, units, 1, rows.pages.longest)


def seen_lists(rows: LayerRows) -> KeyLists:
    """One list a row: its first ``rows.first`` and last ``rows.second`` keys that its window does not hide."""
    device, longest = rows.q.device, rows.pages.longest
    counts = torch.empty(rows.count, dtype=torch.int32, device=device)
    indices = torch.empty(rows.count, longest, dtype=torch.int32, device=device)
    _seen[(rows.count,)](
        rows.pages.lengths,
        rows.hidden(),
        rows.first,
        rows.second,
        counts,
        indices,
        longest,
        SPAN=4096,
        num_warps=8,
        **launched(device),
    )
    return KeyLists(None, counts, indices, 1, 1, longest)


@triton.jit(
    do_not_specialize=["longest"],
    do_not_specialize_on_alignment=["lengths", "hidden", "all_sinks", "windows", "counts"],
)
def _seen(
    lengths, hidden, all_sinks, windows, counts, indices, longest, SPAN: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    low, high = tl.load(hidden + 2 * row), tl.load(hidden + 2 * row + 1)
    sinks, near = tl.load(all_sinks + row), length - tl.load(windows + row)
    out = indices + row.to(tl.int64) * longest
    placed = 0
    for start in tl.range(0, length, SPAN):
        key = start + tl.arange(0, SPAN)
        seen = (key < length) & ((key < sinks) | (key >= near)) & ((key < low) | (key >= high))
        tl.store(out + placed + tl.cumsum(seen.to(tl.int32), 0) - 1, key, mask=seen)
        placed += tl.sum(seen.to(tl.int32), 0)
    tl.store(counts + row, placed)


@triton.jit
def entries_from(address, base):
    """How many 4-byte entries behind pointer ``base`` an address (int64) lies."""
    return (address - base.to(tl.int64)) // 4


@triton.jit(do_not_specialize=["word_row"], do_not_specialize_on_alignment=["words", "lengths"])
def _kept_lists(
    words, lengths, starts, counts, word_row, UNITS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    unit = tl.arange(0, PADDED)
    mine = unit < UNITS
    count = tl.zeros([PADDED], tl.int32)
    start = tl.zeros([PADDED], tl.int64)
    if length > 0:
        own = words + row.to(tl.int64) * word_row
        start += entries_from(tl.load(own), lengths) + unit * tl.load(own + 1)
        kept = tl.load(tl.load(own + 2).to(tl.pointer_type(tl.int64)) + unit, mask=mine, other=0)
        count += (kept + length - tl.load(own + 3)).to(tl.int32)
    tl.store(starts + row * UNITS + unit, start, mask=mine)
    tl.store(counts + row * UNITS + unit, count, mask=mine)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["indices", "starts"])
def _copy_list(indices, starts, out, count, SPAN: tl.constexpr):
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    tl.store(out + at, tl.load(indices + tl.load(starts) + at, mask=at < count, other=0), mask=at < count)


@triton.jit
def hidden_at(cones, row, cone_row, length):
    """The keys (from, to) that a row's window hides (``selection.Cone.start``), and nothing where it hides nothing."""
    cone = cones + row.to(tl.int64) * cone_row
    share, sinks, local = tl.load(cone), tl.load(cone + 1).to(tl.int32), tl.load(cone + 2).to(tl.int32)
    size = tl.maximum(tl.load(cone + 3).to(tl.int32), 1)
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
