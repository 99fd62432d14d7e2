"""Parts of KV blocks brought in within a recorded step: copies from host memory of those that a layer reads and that
are not resident, to the slots that they take (slots_taken.py), and tables that say where all of them lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.blocks import BlockManager
from saccade.kv.host import HostTier
from saccade.kv.listed import COUNT, SHORT
from saccade.kv.offers import Offers
from saccade.ops.triton import pages as block_pages
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.common import begin, launched, pad
from saccade.ops.triton.slots_taken import Used, want

LEAST_RANKED = 16  # blocks of a ranking that are brought in


def bring_in(
    pool: BlockManager, offers: Offers, layer: int, logical: Tensor, pages: Pages, *wanted: KeyLists | None
) -> None:
    """Have all blocks in slots that rows read at ``layer``: those of the lists ``wanted``, or for None all of their
    keys. ``logical`` int32 [rows, >= blocks]: each row's logical blocks. ``pages.tables``, with a row for all KV heads
    or one for each as the pool has it, says afterwards where they lie; in the latter case a block comes for the heads
    that read it. Where slots run short, ``head`` says so, and absent blocks are the guard's slot, whose content is no
    key's."""
    tiers = pool.tiers
    assert tiers is not None
    assert isinstance(tiers.tier, HostTier)
    for number, lists in enumerate(wanted, 1):
        want(pool, offers, layer, logical, pages, lists, last=number == len(wanted))
    rows, page, heads = pages.lengths.shape[0], pages.k.shape[2], pool.rows
    words = block_pages.words_of(tiers.tier.k, heads)
    tiles = -(-words // block_pages.WORDS)
    looks = triton.cdiv(triton.cdiv(pages.longest, page), block_pages.RESOLVED)  # programs for a row of a table
    copiers = block_pages.COPIERS
    _fetch[(copiers + heads * rows * looks,)](
        tiers.tier.k.data_ptr(), tiers.tier.v.data_ptr(), pages.k.data_ptr(), pages.v.data_ptr(),
        offers.which, offers.where, offers.head, pool.slots, logical, pages.lengths, pages.tables,
        layer, pool.logical_blocks, logical.stride(0), *pages.table_strides, tiers.guard, looks, rows,
        COPIERS=copiers, HEADS=heads, PADDED=pad(heads, 1), HEAD=offers.head.shape[1], PARTS=pages.parts, PIECES=words,
        TILES=tiles, WIDTH=block_pages.WORDS, SIZE=page, STEP=block_pages.RESOLVED, W_COUNT=COUNT, num_warps=4,
        **launched(pages.k.device),
    )  # fmt: skip


def find(pool: BlockManager, offers: Offers, layer: int, logical: Tensor, pages: Pages) -> Pages:
    """``pages``, whose tables say where all blocks lie at ``layer``, those that are absent in host memory (``Pages``).
    Nothing moves."""
    assert pool.tiers is not None
    rows, heads = pages.lengths.shape[0], pool.rows
    looks = triton.cdiv(triton.cdiv(pages.longest, pages.k.shape[2]), block_pages.RESOLVED)
    _find[(heads * rows * looks,)](
        pool.slots, offers.cells, logical, pages.lengths, pages.tables, layer, pool.logical_blocks, logical.stride(0),
        *pages.table_strides, pool.tiers.guard, rows, HEADS=heads, SIZE=pages.k.shape[2], STEP=block_pages.RESOLVED,
        num_warps=4, **launched(pages.k.device),
    )  # fmt: skip
    return replace(pages, host=offers.host)


Read = tuple[Tensor, Pages, "KeyLists | Used"]  # logical blocks of some rows, their pages, and what they have read


def bring_later(pool: BlockManager, offers: Offers, layer: int, read: Sequence[Read]) -> None:
    """After all rows have read at ``layer``, ``pages`` as of :func:`find`: some of what was absent takes slots, beside
    what follows. ``head`` says where something that was read lies nowhere."""
    if not read:
        return
    assert pool.tiers is not None
    tier = pool.tiers.tier
    assert isinstance(tier, HostTier)
    for number, (logical, pages, lists) in enumerate(read, 1):
        want(pool, offers, layer, logical, pages, lists, last=number == len(read), later=True)
    heads, (which, where), pages = pool.rows, offers.late[:, layer], read[0][1]
    words = block_pages.words_of(tier.k, heads)
    with offers.beside():
        _bring[(block_pages.COPIERS,)](
            tier.k.data_ptr(), tier.v.data_ptr(), pages.k.data_ptr(), pages.v.data_ptr(), which, where,
            offers.late_count[layer], COPIERS=block_pages.COPIERS, HEADS=heads, PADDED=pad(heads, 1),
            ROOM=which.shape[1], PARTS=pages.parts, PIECES=words, TILES=-(-words // block_pages.WORDS),
            WIDTH=block_pages.WORDS, num_warps=4,
        )  # fmt: skip


class Arrivals(NamedTuple):
    """What rows read at ``layer``: brought in as of :func:`bring_in`, or found as of :func:`find` and noted in
    ``later`` for :func:`bring_later`."""

    pool: BlockManager
    offers: Offers
    layer: int
    logical: Tensor
    later: list[Read]

    def bring(self, pages: Pages, *wanted: KeyLists | None) -> None:
        """See :func:`bring_in`."""
        bring_in(self.pool, self.offers, self.layer, self.logical, pages, *wanted)

    @property
    def waits(self) -> bool:
        """Whether blocks come before they are read."""
        return self.offers.host is None

    def find(self, pages: Pages) -> Pages:
        """See :func:`find`."""
        return find(self.pool, self.offers, self.layer, self.logical, pages)

    def was_read(self, pages: Pages, *read: KeyLists | Used) -> None:
        """Rows over ``pages`` have read so."""
        self.later.extend((self.logical, pages, one) for one in read)

    def ranks_read(
        self, pages: Pages, ranking: tuple[Tensor, Tensor, Tensor], size: int, used: Tensor, microbatch: int
    ) -> None:
        """The same for a ranking of blocks of ``size`` keys, of which rules have used so many microbatches."""
        always, order, counts = ranking
        units = order.shape[0] // pages.lengths.shape[0]
        whole = KeyLists(None, counts[0], always, units, size, always.shape[1])
        ranked = KeyLists(None, counts[1], order, units, size, order.shape[1])
        self.was_read(pages, whole, Used(ranked, used, microbatch))

    def bring_ranked(self, pages: Pages, ranking: tuple[Tensor, Tensor, Tensor], size: int) -> None:
        """The same for a ranking of blocks of ``size`` keys (batched_rank.rank_blocks): those without a rank, and the
        first ones, as far as ``offers.reach`` says."""
        always, order, counts = ranking
        units = order.shape[0] // pages.lengths.shape[0]
        upto = torch.minimum(counts[1], self.offers.reach[self.layer])
        whole = KeyLists(None, counts[0], always, units, size, always.shape[1])
        self.bring(pages, whole, KeyLists(None, upto, order, units, size, order.shape[1]))

    def follow(self, used: Tensor, microbatch: int, ranked: Tensor) -> None:
        """Rules have used so many microbatches (int32 [units]) of rankings of ``ranked`` blocks: where that is more
        than was brought in, what they made of it does not hold, and ``head`` says so; the next step brings in more."""
        reach, head = self.offers.reach, self.offers.head
        _follow[(1,)](
            used, ranked, reach, head, self.layer, used.numel(), microbatch, head.numel(), HEAD=head.shape[1],
            HEADS=triton.next_power_of_2(head.shape[0]), WIDTH=triton.next_power_of_2(used.numel()),
            LEAST=LEAST_RANKED, W_SHORT=SHORT, num_warps=1,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "k_from", "v_from", "k_to", "v_to", "layer", "blocks", "logical_row", "table_row", "table_head", "guard",
        "looks", "rows",
    ],
    do_not_specialize_on_alignment=["which", "where", "head", "slots", "logical", "lengths", "tables"],
)  # fmt: skip
def _fetch(
    k_from, v_from, k_to, v_to, which, where, head, slots, logical, lengths, tables, layer, blocks, logical_row,
    table_row, table_head, guard, looks, rows,
    COPIERS: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr, HEAD: tl.constexpr, PARTS: tl.constexpr,
    PIECES: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    W_COUNT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first programs copy what comes for a layer; the others look up where its rows' blocks lie from now on."""
    begin(EARLY)
    program = tl.program_id(0)
    if program < COPIERS:
        block_pages.copy_lists(
            program, COPIERS, k_from, v_from, k_to, v_to, which, where, head + W_COUNT, blocks, HEAD, HEADS, PADDED,
            PARTS, PIECES, TILES, WIDTH,
        )  # fmt: skip
    else:
        program -= COPIERS
        own, row, part = program % HEADS, (program // HEADS) % rows, program // HEADS // rows
        table = tables + row.to(tl.int64) * table_row + own.to(tl.int64) * table_head
        block_pages.resolve_row(
            slots + (layer * HEADS + own).to(tl.int64) * blocks, logical + row.to(tl.int64) * logical_row,
            tl.load(lengths + row), table, part, guard, SIZE, STEP,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "blocks", "logical_row", "table_row", "table_head", "guard", "rows"],
    do_not_specialize_on_alignment=["slots", "cells", "logical", "lengths", "tables"],
)
def _find(
    slots, cells, logical, lengths, tables, layer, blocks, logical_row, table_row, table_head, guard, rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    program = tl.program_id(0)
    own, row, part = program % HEADS, (program // HEADS) % rows, program // HEADS // rows
    base = (layer * HEADS + own).to(tl.int64) * blocks
    at = part * STEP + tl.arange(0, STEP)
    real = at < tl.cdiv(tl.load(lengths + row), SIZE)
    block = tl.load(logical + row.to(tl.int64) * logical_row + at, mask=real, other=0)
    slot = tl.load(slots + base + block, mask=real, other=-1)
    cell = tl.load(cells + base + block, mask=real & (slot < 0), other=0)
    table = tables + row.to(tl.int64) * table_row + own.to(tl.int64) * table_head
    tl.store(table + at, tl.where(slot >= 0, slot, tl.where(cell > 0, -cell, guard)), mask=real)


@triton.jit(
    do_not_specialize=["k_from", "v_from", "k_to", "v_to"], do_not_specialize_on_alignment=["which", "where", "count"]
)
def _bring(
    k_from, v_from, k_to, v_to, which, where, count, COPIERS: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
    ROOM: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block_pages.copy_lists(
        tl.program_id(0), COPIERS, k_from, v_from, k_to, v_to, which, where, count, ROOM, 1, HEADS, PADDED, PARTS,
        PIECES, TILES, WIDTH,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "count", "microbatch", "words"], do_not_specialize_on_alignment=["used", "ranked"]
)
def _follow(
    used, ranked, reach, head, layer, count, microbatch, words,
    HEAD: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, LEAST: tl.constexpr, W_SHORT: tl.constexpr,
):  # fmt: skip
    unit = tl.arange(0, WIDTH)
    blocks = tl.load(used + unit, mask=unit < count, other=0) * microbatch
    most = tl.max(tl.minimum(blocks, tl.load(ranked + unit, mask=unit < count, other=0)), 0)
    at = tl.arange(0, HEADS) * HEAD + W_SHORT
    short = tl.load(head + at, mask=at < words, other=0)
    came, before = tl.load(reach + layer), tl.max(short & 1, 0) | tl.max(short & 2, 0)
    if most > came:
        tl.store(head + W_SHORT, before | 2)
    after = tl.where(most > came, 2 * came, tl.maximum(most + most // 2, came - came // 4))
    # What follows a shortage is made of blocks that did not come. Where slots were short, less is to be asked for.
    after = tl.where(before == 0, after, tl.where(before == 2, came, came // 2))
    tl.store(reach + layer, tl.maximum(after, LEAST))
