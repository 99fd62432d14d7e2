"""Which parts of KV blocks that a layer reads are not resident, and whose slots they take, within a recorded step. The
host is asked nothing; kv/offers.py has the words of both sides.

A second chance lies in the order of the list, which is the host's replacement, and in passing over slots that were used
since it was made.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.blocks import BlockManager
from saccade.kv.listed import ARRIVED, COUNT, END, HITS, LISTED, MISSED, NEXT, READ, SHORT, STEP, WANTED
from saccade.kv.offers import Offers
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.common import begin, launched

ENTRIES = 256  # of a list that a program looks at together: of what a layer reads, and of slots to be taken


class Used(NamedTuple):
    """The first ``used`` microbatches (int32 [units]) of ``lists``, of so many blocks each."""

    lists: KeyLists
    used: Tensor
    microbatch: int


def want(
    pool: BlockManager,
    offers: Offers,
    layer: int,
    logical: Tensor,
    pages: Pages,
    lists: KeyLists | Used | None,
    last: bool,
    later: bool = False,
) -> None:
    """Stamp the slots of what rows read at ``layer``, and have its absent blocks take slots: with the ``last`` of its
    lists, which None says to be all keys. ``logical`` and ``pages`` as of residency.bring_in; ``later``: the blocks
    were read where they lie."""
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
