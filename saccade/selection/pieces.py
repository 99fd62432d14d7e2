"""Selections in pieces, for keys that do not lie in memory all at once: which blocks one reads, and its part that reads
a stretch of the keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.selection.base import Band, Dense, Selection, Shape, Tokens
from saccade.selection.blocks import Blocks
from saccade.selection.candidates import Candidates
from saccade.selection.csr import list_ids, offsets_of
from saccade.selection.lines import Lines
from saccade.selection.mixed import Mixed
from saccade.selection.sampled import Sampled
from saccade.selection.tri import Tri
from saccade.selection.window import Windowed
from saccade.selection.wrapped import Wrapped

GRID = 128  # of the lists of blocks that stand for everything: coarse ones are quick to make and to read


def read_blocks(selection: Selection, size: int) -> Tensor:
    """Bool [blocks of ``size`` keys], on the device of ``selection`` and its lists: which of them it may read a key of.
    At times more than that."""
    shape = selection.shape
    mask = torch.zeros(-(-shape.k_len // size), dtype=torch.bool, device=shape.device)
    stop = shape.q_start + shape.q_len
    if isinstance(selection, Band):
        mask[: -(-min(selection.sinks, shape.k_len) // size)] = True
        mask[max(0, shape.q_start - selection.window + 1) // size : -(-stop // size)] = True
    elif isinstance(selection, Blocks):
        chosen = torch.unique(selection.indices[: int(selection.offsets[-1])].long())
        _mark(mask, chosen * selection.block_size, selection.block_size, size)
    elif isinstance(selection, (Tokens, Sampled)):
        tokens = selection.tokens if isinstance(selection, Sampled) else selection
        mask[tokens.indices[: int(tokens.offsets[-1])].long() // size] = True
    elif isinstance(selection, Candidates) and (selection.full is None or not bool(selection.full.any())):
        first, last = selection.forced
        mask[selection.indices[: int(selection.offsets[-1])].long() // size] = True
        mask[: -(-max(first, min(selection.idle_keys, shape.k_len)) // size)] = True
        mask[last // size : -(-shape.k_len // size)] = True
    elif isinstance(selection, Lines):
        mask[selection.columns[: int(selection.v_offsets[-1])].long() // size] = True
        far = torch.unique(selection.distances[: int(selection.s_offsets[-1])].long())
        _mark(mask, shape.q_start - far, shape.q_len, size)
    elif isinstance(selection, Windowed):
        mask |= read_blocks(selection.inner, size)
        mask[shape.q_start // size : -(-stop // size)] = True  # a row that sees nothing reads its own key
    elif isinstance(selection, Mixed):
        for part in selection.parts:
            mask |= read_blocks(part, size)
    elif isinstance(selection, Tri) and selection.band_rows == shape.q_len:
        mask |= read_blocks(selection.band, size)
    else:
        mask[: -(-stop // size)] = True
    return mask


def read_blocks_by_head(selection: Selection, size: int) -> Tensor | None:
    """The same for each KV head, bool [kv_heads, blocks]; None where all of them read alike, or where that is not
    known."""
    shape, kv_heads, units = selection.shape, selection.shape.kv_heads, selection.units
    if not isinstance(selection, (Blocks, Tokens)) or kv_heads == 1 or units % kv_heads:
        return None
    lists = selection.q_blocks if isinstance(selection, Blocks) else shape.q_len
    edges = selection.offsets[:: lists * (units // kv_heads)].tolist()
    mask = torch.zeros(kv_heads, -(-shape.k_len // size), dtype=torch.bool, device=shape.device)
    for own, first, last in zip(mask, edges, edges[1:]):
        chosen = selection.indices[first:last].long()
        if isinstance(selection, Blocks):
            _mark(own, torch.unique(chosen) * selection.block_size, selection.block_size, size)
        else:
            own[chosen // size] = True
    return mask


def grid_of(selection: Selection, size: int) -> int:
    """Stretches of keys that begin and end on this grid are cut out without a rest, blocks of ``size`` too."""
    return math.lcm(size, selection.block_size if isinstance(selection, Blocks) else GRID)


def between(selection: Selection, first: int, last: int) -> Selection:
    """What ``selection`` reads of the keys ``first .. last - 1``, which begin and end on its grid (or at the last
    key)."""
    if isinstance(selection, Dense):
        return _dense_between(selection.shape, first, last)
    if isinstance(selection, Blocks):
        size = selection.block_size
        listed = selection.indices[: int(selection.offsets[-1])]
        keep = (listed >= first // size) & (listed < -(-last // size))
        return replace(selection, offsets=_kept_offsets(selection.offsets, keep), indices=listed[keep])
    if isinstance(selection, Tokens):
        listed = selection.indices[: int(selection.offsets[-1])]
        keep = (listed >= first) & (listed < last)
        return replace(selection, offsets=_kept_offsets(selection.offsets, keep), indices=listed[keep])
    return Between(selection, first, last)


def apart(selection: Selection, far: Tensor, size: int) -> tuple[Selection, Selection]:
    """What a decode step's ``selection`` (Dense, Band, Blocks or Tokens) reads outside of the blocks ``far`` (bool
    [blocks of ``size`` keys], on the host), and what within. An entry of a list must not lie in both."""
    shape = selection.shape
    if type(selection) is Dense:
        every = torch.arange(-(-shape.k_len // size), device=shape.device)
        selection = Blocks.from_lists(shape, size, [every])
    elif type(selection) is Band:
        selection = Tokens.from_mask(shape, selection.row_mask(0, 0, 1)[None])
    assert isinstance(selection, Blocks | Tokens)
    listed = selection.indices[: int(selection.offsets[-1])]
    each = selection.block_size if isinstance(selection, Blocks) else 1
    there = far.to(listed.device)[listed.long() * each // size]
    near, beyond = (
        replace(selection, offsets=_kept_offsets(selection.offsets, keep), indices=listed[keep])
        for keep in (~there, there)
    )
    return near, beyond


@dataclass(frozen=True, eq=False)
class Between(Wrapped):
    """What ``inner`` reads of the keys ``first .. last - 1``, for kinds that cannot say so themselves."""

    first: int
    last: int

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        mask = self.inner.row_mask(unit, start, stop)
        keys = torch.arange(mask.shape[1], device=mask.device)
        return mask & (keys >= self.first) & (keys < self.last)


def _dense_between(shape: Shape, first: int, last: int) -> Blocks:
    rows = torch.arange(shape.q_start // GRID, (shape.q_start + shape.q_len - 1) // GRID + 1, device="cpu")
    begin = first // GRID
    counts = (torch.clamp(rows + 1, max=-(-last // GRID)) - begin).clamp(min=0)
    offsets = offsets_of(counts)
    which = list_ids(offsets)
    indices = torch.arange(int(offsets[-1]), device="cpu") - offsets[which] + begin
    return Blocks(shape, GRID, offsets, indices.to(torch.int32))


def _kept_offsets(offsets: Tensor, keep: Tensor) -> Tensor:
    """The offsets of lists of which ``keep`` is left."""
    before = torch.nn.functional.pad(keep.long().cumsum(0), (1, 0))
    return before[offsets]


def _mark(mask: Tensor, starts: Tensor, length: int, size: int) -> None:
    """Mark the blocks of the stretches of ``length`` keys from ``starts`` on, as far as they lie within."""
    edges = torch.zeros(mask.numel() + 1, dtype=torch.int32, device=mask.device)
    stops = -(-(starts + length) // size)
    inside = (stops > 0) & (starts < mask.numel() * size)
    first, last = (starts[inside] // size).clamp(min=0), stops[inside].clamp(max=mask.numel())
    edges.index_add_(0, first, torch.ones_like(first, dtype=torch.int32))
    edges.index_add_(0, last, -torch.ones_like(last, dtype=torch.int32))
    mask |= edges.cumsum(0)[:-1] > 0
