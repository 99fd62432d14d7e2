"""Parts of KV blocks brought in within a recorded step: which of those that a layer reads are not resident, whose slots
they take, and their copies from host memory. The host is asked nothing; kv/offers.py has the words of both sides.

A second chance lies in the order of the list, which is the host's replacement, and in passing over slots that were used
since it was made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.blocks import BlockManager
from saccade.kv.host import HostTier
from saccade.kv.offers import COUNT, END, HITS, LISTED, MISSED, NEXT, SHORT, STEP, WANTED, Offers
from saccade.ops.triton import pages as block_pages
from saccade.ops.triton.decode import KeyLists, Pages

ENTRIES = 256  # of a list that a program looks at
LEAST_RANKED = 16  # blocks of a ranking that are brought in
TAKEN = 1024  # listed slots that are looked at together


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
    for lists in wanted:
        _look(pool, offers, layer, logical, pages, lists)
    page, head = pages.k.shape[2], offers.head
    _take[(pool.rows,)](
        pool.slots, offers.cells, offers.listed, offers.holding, offers.taken, offers.stamp, offers.missing,
        offers.which, offers.where, head, layer, pool.layers, pool.logical_blocks, offers.stamp.shape[1],
        HEAD=head.shape[1], FIFO=tiers.policy == "fifo", WIDTH=TAKEN,
        W_STEP=STEP, W_SHORT=SHORT, W_NEXT=NEXT, W_END=END, W_LISTED=LISTED,
        W_MISSED=MISSED, W_WANTED=WANTED, W_COUNT=COUNT, num_warps=8,
    )  # fmt: skip
    block_pages.launch_copies(
        (tiers.tier.k, tiers.tier.v),
        offers.which,
        (pages.k, pages.v),
        offers.where,
        head[:, COUNT:],
        pool.logical_blocks,
        pool.rows,
    )
    part = pool.slots[layer : layer + 1]
    block_pages.resolve(part, logical, pages.lengths, page, pages.longest, pages.tables[None], absent=tiers.guard)


def bring_in_ranked(
    pool: BlockManager,
    offers: Offers,
    layer: int,
    logical: Tensor,
    pages: Pages,
    ranking: tuple[Tensor, Tensor, Tensor],
    size: int,
) -> None:
    """The same for a ranking of blocks of ``size`` keys (batched_rank.rank_blocks): those without a rank, and the first
    ones, as far as ``offers.reach`` says."""
    always, order, counts = ranking
    units = order.shape[0] // pages.lengths.shape[0]
    upto = torch.minimum(counts[1], offers.reach[layer])
    whole = KeyLists(None, counts[0], always, units, size, always.shape[1])
    first = KeyLists(None, upto, order, units, size, order.shape[1])
    bring_in(pool, offers, layer, logical, pages, whole, first)


def follow_reach(offers: Offers, layer: int, used: Tensor, microbatch: int, ranked: Tensor) -> None:
    """Rules have used so many microbatches (int32 [units]) of rankings of ``ranked`` blocks: where that is more than
    was brought in, what they made of it does not hold, and ``head`` says so; the next step brings in more."""
    _follow[(1,)](
        used, ranked, offers.reach, offers.head, layer, used.numel(), microbatch, offers.head.numel(),
        HEAD=offers.head.shape[1], HEADS=triton.next_power_of_2(offers.head.shape[0]),
        WIDTH=triton.next_power_of_2(used.numel()), LEAST=LEAST_RANKED, W_SHORT=SHORT, num_warps=1,
    )  # fmt: skip


def _look(
    pool: BlockManager, offers: Offers, layer: int, logical: Tensor, pages: Pages, lists: KeyLists | None
) -> None:
    rows, page = pages.lengths.shape[0], pages.k.shape[2]
    size, units = (0, 1) if lists is None else (lists.size, lists.units)
    longest = -(-pages.longest // page) if lists is None else lists.longest
    none = pages.lengths  # unused pointers must still be pointers
    wide = max(units, pool.rows)
    _want[(triton.cdiv(longest, ENTRIES), wide, rows)](
        pool.slots, logical, pages.lengths,
        none if lists is None or lists.counts is None else lists.counts,
        none if lists is None else lists.indices,
        offers.stamp, offers.mark, offers.missing, offers.head, layer, pool.layers, pool.logical_blocks,
        offers.stamp.shape[1], logical.stride(0), longest,
        UNITS=units, HEADS=pool.rows, WIDE=wide, HEAD=offers.head.shape[1],
        SIZE=size, PAGE=page, PAGES=max(1, size // page), STEP=ENTRIES, W_STEP=STEP, W_HITS=HITS,
        W_WANTED=WANTED, num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "layers", "blocks", "places", "logical_row", "longest"],
    do_not_specialize_on_alignment=["slots", "logical", "lengths", "counts", "indices"],
)
def _want(
    slots, logical, lengths, counts, indices, stamp, mark, missing, head, layer, layers, blocks, places, logical_row,
    longest,
    UNITS: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, HEAD: tl.constexpr,
    SIZE: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, STEP: tl.constexpr,
    W_STEP: tl.constexpr, W_HITS: tl.constexpr, W_WANTED: tl.constexpr,
):  # fmt: skip
    """Stamp the slots of what one row's list names, and gather the blocks that have none, each once; for one KV head
    that has slots of its own, or for all of them."""
    unit, row = tl.program_id(1) * UNITS // WIDE, tl.program_id(2).to(tl.int64)
    own = tl.program_id(1) * HEADS // WIDE
    slots += (layer * HEADS + own) * blocks
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
        listed = number < count
    else:
        entry = row * UNITS + unit
        count = tl.load(counts + entry).to(tl.int32)
        listed = number < count
        first = tl.load(indices + entry * longest + number, mask=listed, other=0).to(tl.int32) * SIZE // PAGE
    for more in tl.static_range(PAGES):
        page = first + more
        real = listed & (page * PAGE < length)
        block = tl.load(logical + row * logical_row + page, mask=real, other=0)
        slot = tl.load(slots + block, mask=real, other=-1)
        here = real & (slot >= 0)
        before = tl.atomic_xchg(stamp + tl.where(here, slot, 0), now, mask=here)
        tl.atomic_add(head + W_HITS, tl.sum((here & (before != now)).to(tl.int32)))
        gone = real & (slot < 0)
        before = tl.atomic_xchg(mark + block, now, mask=gone)
        fresh = gone & (before != now)
        ones = fresh.to(tl.int32)
        total = tl.sum(ones)
        if total > 0:
            place = tl.atomic_add(head + W_WANTED, total) + tl.cumsum(ones, 0) - ones
            tl.store(missing + place, block, mask=fresh)


@triton.jit(do_not_specialize=["layer", "layers", "blocks", "places"])
def _take(
    slots, cells, listed, holding, taken, stamp, missing, which, where, head, layer, layers, blocks, places,
    HEAD: tl.constexpr, FIFO: tl.constexpr, WIDTH: tl.constexpr, W_STEP: tl.constexpr, W_SHORT: tl.constexpr,
    W_NEXT: tl.constexpr, W_END: tl.constexpr, W_LISTED: tl.constexpr, W_MISSED: tl.constexpr, W_WANTED: tl.constexpr,
    W_COUNT: tl.constexpr,
):  # fmt: skip
    """One program for a KV head, or for all: the layer's misses take listed slots in order, passing over those that are
    used."""
    own = tl.program_id(0)
    base = (layer * tl.num_programs(0) + own) * blocks
    listed += own * places
    holding += own * places
    taken += own * places
    stamp += own * places
    missing += own * blocks
    which += own * blocks
    where += own * blocks
    head += own * HEAD
    now = tl.load(head + W_STEP) * layers + layer
    limit = now
    if not FIFO:
        limit = tl.load(head + W_LISTED)
    wanted, at, end = tl.load(head + W_WANTED), tl.load(head + W_NEXT), tl.load(head + W_END)
    done, short = wanted * 0, wanted * 0
    step = tl.arange(0, WIDTH)
    while (done < wanted) & (at < end):
        inside = at + step < end
        slot = tl.load(listed + at + step, mask=inside, other=-1)
        seen = tl.load(stamp + tl.where(slot >= 0, slot, 0), mask=slot >= 0, other=0)
        free = (slot >= 0) & (seen < limit)
        rank = done + tl.cumsum(free.to(tl.int32), 0) - 1
        use = free & (rank < wanted)
        part = base + tl.load(missing + tl.where(use, rank, 0), mask=use, other=0)
        cell = tl.load(cells + part, mask=use, other=1)
        left = tl.load(holding + at + step, mask=use, other=-1)
        short += tl.sum((use & (cell <= 0)).to(tl.int32))  # nobody knows where it lies: the host is to say so
        comes = use & (cell > 0)
        tl.store(slots + tl.where(left >= 0, left, 0), -1, mask=comes & (left >= 0))
        tl.store(slots + part, slot, mask=comes)
        tl.store(stamp + tl.where(comes, slot, 0), now, mask=comes)
        tl.store(taken + at + step, part, mask=comes)
        tl.store(which + tl.where(use, rank, 0), tl.where(comes, cell - 1, -1), mask=use)
        tl.store(where + tl.where(use, rank, 0), slot, mask=use)
        done += tl.sum(use.to(tl.int32))
        last = tl.max(tl.where(use, step + 1, 0), 0)
        at = tl.minimum(tl.where(done >= wanted, at + last, at + WIDTH), end)
    tl.store(head + W_NEXT, at)
    tl.store(head + W_COUNT, done)
    tl.store(head + W_MISSED, tl.load(head + W_MISSED) + wanted)
    tl.store(head + W_WANTED, 0)
    if (done < wanted) | (short > 0):
        tl.store(head + W_SHORT, tl.load(head + W_SHORT) | 1)


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
