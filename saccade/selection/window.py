"""Windows on the context that grow with the row, and what is left of a selection inside one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection.base import Band, Dense, Selection, Shape, Tokens
from saccade.selection.blocks import Blocks, Ranking
from saccade.selection.candidates import Candidates
from saccade.selection.corrected import Corrected
from saccade.selection.csr import list_ids, offsets_of
from saccade.selection.lines import Lines
from saccade.selection.mixed import Mixed
from saccade.selection.narrowed import Narrowed, plain
from saccade.selection.tri import Tri

KERNEL_BLOCK = 16  # on coarser grids than this the cut of everything is a list of blocks, which has fast kernels


@dataclass(frozen=True)
class Cone:
    """Row ``p`` sees key ``i`` iff ``i < sinks`` or ``i >= start(p)``, where ``start`` leaves out the first ``share``
    of the context up to ``p``, but never one of the last ``local`` keys.

    With t = p + 1 that is ``start = max(0, min(floor(share t), t - local + 1) - 1)``: position i is hidden when
    ``sinks <= i`` and ``i + 1 < floor(share t)``. On a grid of ``block_size`` everything is rounded outwards to whole
    blocks: rows of a block share the start of its first row, rounded down, and ``sinks`` is rounded up. What a row sees
    depends on its position alone, and ``start`` never falls from one row to the next.
    """

    share: float
    sinks: int
    local: int = 0
    block_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or min(self.sinks, self.local) < 0 or self.block_size < 1:
            raise SaccadeError(f"{self} needs a share from 0 to 1, sinks and local >= 0 and block_size >= 1")

    @cached_property
    def sink_keys(self) -> int:
        """Keys every row sees: ``sinks`` on the grid."""
        return -(-self.sinks // self.block_size) * self.block_size

    def starts(self, positions: Tensor) -> Tensor:
        """``start`` of the rows at ``positions``, int64 of any shape."""
        size = self.block_size
        length = positions // size * size + 1
        # 0.1 of 10 keys is 1 key, whatever binary fractions make of it.
        hidden = torch.floor(self.share * length.double() + 1e-9).long()
        return (torch.minimum(hidden, length - self.local + 1) - 1).clamp(min=0) // size * size

    def start(self, position: int) -> int:
        """``start`` of one row, without tensors: decode asks for it in every layer and step."""
        length = position // self.block_size * self.block_size + 1
        hidden = min(math.floor(self.share * length + 1e-9), length - self.local + 1)
        return max(0, hidden - 1) // self.block_size * self.block_size

    def row_mask(self, shape: Shape, start: int, stop: int) -> Tensor:
        """bool [stop - start, k_len]: what rows ``start .. stop - 1`` of a call see, acausal keys included."""
        keys = torch.arange(shape.k_len, device=shape.device)[None, :]
        return (keys < self.sink_keys) | (keys >= self.starts(shape.rows[start:stop])[:, None])


@dataclass(frozen=True, eq=False)
class Windowed(Narrowed):
    """What ``inner`` selects within ``cone``."""

    cone: Cone

    def allowed(self, unit: int, start: int, stop: int) -> Tensor:
        return self.cone.row_mask(self.shape, start, stop)

    @cached_property
    def starts(self) -> Tensor:
        """``start`` of every row: int64 [q_len]."""
        return self.cone.starts(self.shape.rows)

    def emptied(self, unit: int) -> Tensor:
        """Rows of a unit that keep only their own key, for the window hides all they read: int64, rising. Of lines and
        blocks; a row of the other kinds that have kernels reads its own key anyway."""
        if isinstance(self.inner, (Blocks, Lines)):
            return self.inner.emptied(self._inner_unit(unit), self.starts, self.cone.sink_keys)
        return torch.empty(0, dtype=torch.int64, device=self.shape.device)

    def unit_pairs(self) -> Tensor:
        inner, sinks = self.inner, self.cone.sink_keys
        if isinstance(inner, Dense):
            inner = Band(self.shape, window=self.shape.k_len)
        if isinstance(inner, (Band, Tri)):
            return inner.row_pairs(self.starts, sinks).sum()[None]
        if isinstance(inner, (Blocks, Lines)):
            seen = inner.seen_pairs(self.starts, sinks)
            return seen + seen.new_tensor([self.emptied(unit).numel() for unit in range(self.units)])
        return super().unit_pairs()


def cut(selection: Selection, cone: Cone) -> Selection:
    """What is left of ``selection`` within ``cone``, in the cheapest kind that can say it.

    Exact, but for two things: a row that would lose its last key keeps its own position (a list of blocks its own
    block), and a ranked block of which any key is seen stays whole.
    """
    shape = selection.shape
    last = shape.q_start + shape.q_len - 1
    if cone.start(last) <= cone.sink_keys:
        return selection
    if isinstance(selection, Corrected):  # block means would show what the window hides
        raise SaccadeError("tail=mean does not go with a window; leave one of them out")
    if isinstance(selection, Dense):
        return _cut_dense(shape, cone, last)
    if isinstance(selection, Band):
        return _cut_band(selection, cone, last)
    if isinstance(selection, Tokens):
        return _cut_tokens(selection, cone)
    if isinstance(selection, Blocks):
        return _cut_blocks(selection, cone)
    if isinstance(selection, Ranking):
        return _cut_ranking(selection, cone, last)
    if isinstance(selection, Candidates):
        return _cut_candidates(selection, cone, last)
    if isinstance(selection, Mixed):
        return replace(selection, parts=tuple(_cut_part(part, cone) for part in selection.parts))
    return plain(Windowed(selection, cone))


def _cut_part(part: Selection, cone: Cone) -> Selection:
    left = cut(part, cone)
    if isinstance(part, Tokens) or not isinstance(left, Tokens):
        return left
    # One row's keys as columns: token lists have no kernel beside other kinds.
    return Lines(left.shape, left.offsets, left.indices, torch.zeros_like(left.offsets), left.indices[:0])


def _cut_dense(shape: Shape, cone: Cone, last: int) -> Selection:
    if shape.q_len == 1:
        return Band(shape, window=last + 1 - cone.start(last), sinks=cone.sink_keys)
    size = cone.block_size
    if size < KERNEL_BLOCK:
        return Windowed(Dense(shape), cone)
    block = torch.arange(-(-shape.k_len // size), device=shape.device)
    starts = _query_block_starts(shape, size, cone) // size
    seen = (block < cone.sink_keys // size) | (block >= starts[:, None])
    return Blocks.from_block_mask(shape, size, seen[None])


def _cut_band(band: Band, cone: Cone, last: int) -> Selection:
    rows = band.shape.rows
    starts, near, sinks = cone.starts(rows), rows - band.window + 1, cone.sink_keys
    far = min(band.sinks, int(starts.max()))
    if far <= sinks and not bool((near.clamp(min=sinks) < starts).any()):
        return band
    start = int(starts[-1])
    # Each one's sinks may reach into the other's window; then what both see is no band.
    if band.shape.q_len == 1 and min(start, last - band.window + 1) >= max(sinks, band.sinks):
        return Band(band.shape, window=min(band.window, last + 1 - start), sinks=min(band.sinks, sinks))
    return plain(Windowed(band, cone))


def _cut_tokens(tokens: Tokens, cone: Cone) -> Tokens:
    rows = tokens.shape.to(tokens.offsets.device).rows
    starts, rows = cone.starts(rows).repeat(tokens.units), rows.repeat(tokens.units)
    keep = (tokens.indices < cone.sink_keys) | (tokens.indices >= starts[list_ids(tokens.offsets)])
    return Tokens(tokens.shape, *_filtered(tokens.offsets, tokens.indices, keep, rows))


def _cut_blocks(blocks: Blocks, cone: Cone) -> Selection:
    size = blocks.block_size
    if size > cone.block_size >= KERNEL_BLOCK and size % cone.block_size == 0:
        blocks = _finer(blocks, cone.block_size)
        size = cone.block_size
    if cone.block_size % size:
        return plain(Windowed(blocks, cone))
    device = blocks.offsets.device
    starts = _query_block_starts(blocks.shape.to(device), size, cone).repeat(blocks.units) // size
    keep = (blocks.indices < cone.sink_keys // size) | (blocks.indices >= starts[list_ids(blocks.offsets)])
    own = (blocks.first_q_block + torch.arange(blocks.q_blocks, device=device)).repeat(blocks.units)
    return Blocks(blocks.shape, size, *_filtered(blocks.offsets, blocks.indices, keep, own))


def _cut_ranking(ranking: Ranking, cone: Cone, last: int) -> Ranking:
    size, start = ranking.block_size, cone.start(last)

    def seen(blocks: Tensor, values: Tensor) -> Tensor:
        """What stands in ``values`` [k * units, m] for those of ``blocks`` [units, m] that are seen."""
        keep = (blocks * size < cone.sink_keys) | ((blocks + 1) * size > start)
        counts = keep.sum(1)
        if bool((counts != counts[0]).any()):
            raise SaccadeError("a window leaves unequal numbers of ranked blocks; the units must rank the same blocks")
        per_unit = values.shape[0] // blocks.shape[0]
        return values[keep.repeat_interleave(per_unit, 0)].view(values.shape[0], int(counts[0]))

    always, order, guess = ranking.always, ranking.order, ranking.estimates
    estimates = None if guess is None else seen(order, guess)
    return replace(ranking, always=seen(always, always), order=seen(order, order), estimates=estimates)


def _cut_candidates(candidates: Candidates, cone: Cone, last: int) -> Candidates:
    """Forced keys and candidates within the cone; the ranking is among those."""
    sinks, start = cone.sink_keys, cone.start(last)
    if candidates.hidden != (0, 0):
        candidates = candidates.spelt_out()
    offsets, indices, full = candidates.offsets, candidates.indices, candidates.full
    keep = (indices < sinks) | (indices >= start)
    if not bool(keep.all()):
        offsets, indices = _kept(offsets, indices, keep)
    if candidates.local == 0:  # then the row's own key is forced for no row, and a list may end empty
        empty = offsets.diff() == 0
        own = offsets.new_full((candidates.units,), last)
        offsets, indices = _joined(offsets, indices, empty if full is None else empty & ~full, own)
    return replace(
        candidates,
        offsets=offsets,
        indices=indices,
        sinks=min(candidates.sinks, sinks),
        local=min(candidates.local, last + 1 - start),
        idle_keys=min(candidates.idle_keys, sinks),
        hidden=(0, 0) if full is None else (sinks, start),
    )


def _query_block_starts(shape: Shape, size: int, cone: Cone) -> Tensor:
    """``start`` of every query block of ``size`` rows, which must lie within the cone's blocks: int64 [q_blocks]."""
    first, last = shape.q_start // size, (shape.q_start + shape.q_len - 1) // size
    return cone.starts(torch.arange(first, last + 1, device=shape.device) * size)


def _finer(blocks: Blocks, size: int) -> Blocks:
    """The same selection on a finer grid."""
    ratio, shape = blocks.block_size // size, blocks.shape
    first, last = shape.q_start // size, (shape.q_start + shape.q_len - 1) // size
    mask = blocks.block_mask().repeat_interleave(ratio, 1).repeat_interleave(ratio, 2)
    skipped = first - blocks.first_q_block * ratio
    mask = mask[:, skipped : skipped + last - first + 1, : -(-shape.k_len // size)]
    return Blocks.from_block_mask(shape, size, mask)


def _filtered(offsets: Tensor, indices: Tensor, keep: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """(offsets, indices) of what is kept of flat lists; a list that would lose its last entry gets its ``own``."""
    if bool(keep.all()):
        return offsets, indices
    left, kept = _kept(offsets, indices, keep)
    return _joined(left, kept, (left.diff() == 0) & (offsets.diff() > 0), own)


def _kept(offsets: Tensor, indices: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    return before[offsets], indices[keep]


def _joined(offsets: Tensor, indices: Tensor, empty: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Flat lists, of which the ``empty`` ones get their ``own`` entry."""
    if not bool(empty.any()):
        return offsets, indices
    which = torch.cat([list_ids(offsets), empty.nonzero()[:, 0]])
    order = torch.sort(which, stable=True).indices
    left = torch.cat([indices, own[empty].to(indices.dtype)])
    return offsets_of(offsets.diff() + empty), left[order]
