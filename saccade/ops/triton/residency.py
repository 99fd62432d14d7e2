"""Parts of KV blocks brought in within a recorded step: which of those that a layer reads are not resident, whose slots
they take, and their copies from host memory. The host is asked nothing; kv/offers.py has the words of both sides.

A second chance lies in the order of the list, which is the host's replacement, and in passing over slots that were used
since it was made.
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
from saccade.kv.listed import ARRIVED, COUNT, END, HITS, LISTED, MISSED, NEXT, READ, SHORT, STEP, WANTED
from saccade.kv.offers import Offers
from saccade.ops.triton import pages as block_pages
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.common import begin, launched, pad

ENTRIES = 256  # of a list that a program looks at together: of what a layer reads, and of slots to be taken
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
        _look(pool, offers, layer, logical, pages, lists, last=number == len(wanted))
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


class Used(NamedTuple):
    """The first ``used`` microbatches (int32 [units]) of ``lists``, of so many blocks each."""

    lists: KeyLists
    used: Tensor
    microbatch: int


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
        _look(pool, offers, layer, logical, pages, lists, last=number == len(read), later=True)
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


def _look(
    pool: BlockManager,
    offers: Offers,
    layer: int,
    logical: Tensor,
    pages: Pages,
    lists: KeyLists | Used | None,
    last: bool,
    later: bool = False,
) -> None:
    tiers, used, times = pool.tiers, None, 1
    assert tiers is not None
    if isinstance(lists, Used):
        lists, used, times = lists
    rows, page = pages.lengths.shape[0], pages.k.shape[2]
    size, units = (0, 1) if lists is None else (lists.size, lists.units)
    longest = -(-pages.longest // page) if lists is None else lists.longest
    none = pages.lengths  # unused pointers must still be pointers
    wide, room = max(units, pool.rows), offers.late.shape[3]
    which, where = offers.late[:, layer] if later else (offers.which, offers.where)
    _want[(triton.cdiv(longest, ENTRIES), wide, rows)](
        pool.slots, logical, pages.lengths,
        none if lists is None or lists.counts is None else lists.counts,
        none if lists is None else lists.indices, none if used is None else used,
        offers.stamp, offers.mark, offers.missing, offers.head, offers.cells, offers.listed, offers.holding,
        offers.taken, which, where, offers.late_count[layer], layer, pool.layers, pool.logical_blocks,
        which.shape[1], offers.stamp.shape[1], logical.stride(0), longest, times,
        ROOM=room if later else 0, EACH=max(1, pages.k.shape[1] // wide), USED=used is not None,
        UNITS=units, HEADS=pool.rows, WIDE=wide, HEAD=offers.head.shape[1],
        SIZE=size, PAGE=page, PAGES=max(1, size // page), STEP=ENTRIES, LAST=last, FIFO=tiers.policy == "fifo",
        W_STEP=STEP, W_SHORT=SHORT, W_NEXT=NEXT, W_END=END, W_LISTED=LISTED, W_HITS=HITS, W_MISSED=MISSED,
        W_WANTED=WANTED, W_COUNT=COUNT, W_ARRIVED=ARRIVED, W_READ=READ, num_warps=4, **launched(pages.k.device),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "layers", "blocks", "room", "places", "logical_row", "longest", "times"],
    do_not_specialize_on_alignment=[
        "slots", "logical", "lengths", "counts", "indices", "used", "which", "where", "late_count",
    ],
)  # fmt: skip
def _want(
    slots, logical, lengths, counts, indices, used, stamp, mark, missing, head, cells, listed, holding, taken, which,
    where, late_count, layer, layers, blocks, room, places, logical_row, longest, times,
    ROOM: tl.constexpr, EACH: tl.constexpr, USED: tl.constexpr,
    UNITS: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, HEAD: tl.constexpr,
    SIZE: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, STEP: tl.constexpr, LAST: tl.constexpr,
    FIFO: tl.constexpr, W_STEP: tl.constexpr, W_SHORT: tl.constexpr, W_NEXT: tl.constexpr, W_END: tl.constexpr,
    W_LISTED: tl.constexpr, W_HITS: tl.constexpr, W_MISSED: tl.constexpr, W_WANTED: tl.constexpr,
    W_COUNT: tl.constexpr, W_ARRIVED: tl.constexpr, W_READ: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Stamp the slots of what one row's list names, and gather the blocks that have none, each once; for one KV head
    that has slots of its own, or for all of them. With ``LAST`` the last program of a head to end takes slots. With
    ``ROOM`` blocks were read where they lie, ``EACH`` KV heads' parts by a program; so many take slots. ``USED``: of
    a list so many times ``times`` entries count."""
    begin(EARLY)
    unit, row = tl.program_id(1) * UNITS // WIDE, tl.program_id(2).to(tl.int64)
    own = tl.program_id(1) * HEADS // WIDE
    base = (layer * HEADS + own) * blocks
    stamp += own * places
    mark += own * blocks
    missing += own * blocks
    head += own * HEAD
    length = tl.load(lengths + row)
    now = tl.load(head + W_STEP) * layers + layer
    number = tl.program_id(0) * STEP + tl.arange(0, STEP)
    if SIZE == 0:
        count = tl.cdiv(length, PAGE)
        first = number
        named = number < count
    else:
        entry = row * UNITS + unit
        count = tl.load(counts + entry).to(tl.int32)
        if USED:
            count = tl.minimum(count, tl.load(used + entry) * times)
        named = number < count
        first = tl.load(indices + entry * longest + number, mask=named, other=0).to(tl.int32) * SIZE // PAGE
    if tl.program_id(0) * STEP < count:
        for more in tl.static_range(PAGES):
            page = first + more
            real = named & (page * PAGE < length)
            block = tl.load(logical + row * logical_row + page, mask=real, other=0)
            slot = tl.load(slots + base + block, mask=real, other=-1)
            here = real & (slot >= 0)
            before = tl.atomic_xchg(stamp + tl.where(here, slot, 0), now, mask=here, sem="relaxed")
            tl.atomic_add(head + W_HITS, tl.sum((here & (before != now)).to(tl.int32)), sem="relaxed")
            gone = real & (slot < 0)
            if tl.max(gone.to(tl.int32), 0) > 0:
                if ROOM > 0:
                    tl.atomic_add(head + W_READ, tl.sum(gone.to(tl.int32)) * EACH, sem="relaxed")
                    bare = gone & (tl.load(cells + base + block, mask=gone, other=1) <= 0)
                    if tl.max(bare.to(tl.int32), 0) > 0:
                        tl.atomic_or(head + W_SHORT, 1, sem="relaxed")
                before = tl.atomic_xchg(mark + block, now, mask=gone, sem="relaxed")
                fresh = gone & (before != now)
                ones = fresh.to(tl.int32)
                place = tl.atomic_add(head + W_WANTED, tl.sum(ones), sem="relaxed") + tl.cumsum(ones, 0) - ones
                tl.store(missing + place, block, mask=fresh)
    if LAST:
        each = tl.num_programs(0) * (WIDE // HEADS) * tl.num_programs(2)  # programs of a head
        tl.debug_barrier()  # all threads' stores come before the arrival that one of them announces
        if tl.atomic_add(head + W_ARRIVED, 1, sem="acq_rel", scope="gpu") == each - 1:
            tl.store(head + W_ARRIVED, 0)
            # Read past this processor's cache, which may hold the word as it was when others came.
            wanted = tl.atomic_xchg(head + W_WANTED, 0, sem="acquire")
            _take(
                slots + base, cells + base, listed + own * places, holding + own * places, taken + own * places,
                stamp, missing, which + own * room, where + own * room, late_count + own, head, slots, base, now,
                wanted, ROOM, FIFO, STEP, W_SHORT, W_NEXT, W_END, W_LISTED, W_MISSED, W_COUNT,
            )  # fmt: skip


@triton.jit
def _take(
    own_slots, cells, listed, holding, taken, stamp, missing, which, where, late_count, head, slots, base, now, wanted,
    ROOM: tl.constexpr, FIFO: tl.constexpr, WIDTH: tl.constexpr, W_SHORT: tl.constexpr, W_NEXT: tl.constexpr,
    W_END: tl.constexpr, W_LISTED: tl.constexpr, W_MISSED: tl.constexpr, W_COUNT: tl.constexpr,
):  # fmt: skip
    """For a KV head, or for all: the ``wanted`` misses of a layer, whose parts begin at ``base``, take listed slots in
    order, passing over those that are used."""
    tl.store(head + W_COUNT, wanted)
    if ROOM > 0:
        tl.store(late_count, 0)
    if wanted > 0:
        tl.store(head + W_MISSED, tl.load(head + W_MISSED) + wanted)
        if ROOM > 0:
            wanted = tl.minimum(wanted, ROOM)
        limit = now
        if not FIFO:
            limit = tl.load(head + W_LISTED)
        at, end = tl.load(head + W_NEXT), tl.load(head + W_END)
        done, short = wanted * 0, wanted * 0
        step = tl.arange(0, WIDTH)
        while (done < wanted) & (at < end):
            inside = at + step < end
            slot = tl.load(listed + at + step, mask=inside, other=-1)
            seen = tl.load(stamp + tl.where(slot >= 0, slot, 0), mask=slot >= 0, other=0, cache_modifier=".cg")
            left = tl.load(holding + at + step, mask=inside, other=-1)
            free = (slot >= 0) & (seen < limit)
            rank = done + tl.cumsum(free.to(tl.int32), 0) - 1
            use = free & (rank < wanted)
            block = tl.load(missing + tl.where(use, rank, 0), mask=use, other=0, cache_modifier=".cg")
            cell = tl.load(cells + block, mask=use, other=1)
            short += tl.sum((use & (cell <= 0)).to(tl.int32))  # place unknown here: the host is to say so
            comes = use & (cell > 0)
            tl.store(slots + tl.where(left >= 0, left, 0), -1, mask=comes & (left >= 0))
            tl.store(own_slots + block, slot, mask=comes)
            tl.store(stamp + tl.where(comes, slot, 0), now, mask=comes)
            tl.store(taken + at + step, base + block, mask=comes)
            tl.store(which + tl.where(use, rank, 0), tl.where(comes, cell - 1, -1), mask=use)
            tl.store(where + tl.where(use, rank, 0), slot, mask=use)
            done += tl.sum(use.to(tl.int32))
            last = tl.max(tl.where(use, step + 1, 0), 0)
            at = tl.minimum(tl.where(done >= wanted, at + last, at + WIDTH), end)
        tl.store(head + W_NEXT, at)
        if ROOM > 0:
            tl.store(late_count, done)
        else:
            tl.store(head + W_COUNT, done)
            if (done < wanted) | (short > 0):
                tl.store(head + W_SHORT, tl.load(head + W_SHORT) | 1)


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
