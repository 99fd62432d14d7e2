"""CIS in recorded steps, where every query head has keys of its own: all in one launch, or all that comes before
attention.

Every program finds for itself which heads of its KV head resemble an earlier step's. Lists of those are copied by all
of them. If others are left, they score the KV head's keys. Up to ``HELD`` keys the last program to end then chooses by
the scores, for each such head, what it reads and what it will share, so that a step needs nothing after attention: the
best of what is read are known by their scores. Up to ``FUSED`` keys programs also read what they have listed: who wrote
a piece of a shared list attends to it, and who chose for a head attends alone. Longer lists are for
triton_keeping.list_and_keep. Means what sharing.py means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.cis.recorded import MOST_STEPS
from saccade.methods.cis.triton_attending import attend_piece, merge_pieces, put_result, queries_at
from saccade.methods.cis.triton_row_words import R, W
from saccade.methods.cis.triton_shared import put_shared, resembled, searchable_at
from saccade.methods.cis.triton_taking import take_best
from saccade.ops.triton.batched_rows import LayerRows, hidden_at
from saccade.ops.triton.best_parts import BOUNDS, put_bounds
from saccade.ops.triton.code_products import products, queries
from saccade.ops.triton.common import (
    LOG2E,
    arrivals,
    begin,
    cap_logits,
    kept_room,
    launched,
    pad,
    pool_rows,
    precision,
)
from saccade.ops.triton.common import processors as processors_of
from saccade.ops.triton.readers import key_codes

HELD = 1 << 14  # scores of a program's heads that one program holds and chooses from
FUSED = 1 << 13  # of these scores where attention is in the same launch
RESIDENT = 4  # programs of four warps that share a processor
REGISTERS = 128
WAIT = 2  # for the kernel before, which stores the step's keys: 0 at once, 1 for the first result, 2 for the first key
TILE = 8  # keys a warp that attention reads in one go
MOST = 128  # programs a KV head
WIDE = 2048  # scores above which a program may have eight warps; up to which one program a KV head is enough


class Chosen(NamedTuple):
    """int8 [rows * heads] who is ``searching``; ``bounds`` int32 [rows, BOUNDS] as choose_keys takes them; ``scores``
    float32 [rows, heads, n]; float64 [rows, kv_heads], to be added up: keys ``scored`` a query head in the mean, and
    query heads that searched. ``done``: lists and anchors are written; else those of who searches are not. ``out`` and
    ``lse``: attention over the lists, where it was asked for and short enough."""

    searching: Tensor
    bounds: Tensor
    scores: Tensor
    scored: Tensor
    searches: Tensor
    done: bool
    out: Tensor | None = None
    lse: Tensor | None = None


def fuses(rows: LayerRows) -> bool:
    """Whether :func:`choose` can attend to these rows, too."""
    return rows.heads // rows.kv_heads * pad(rows.pages.longest, 64) <= min(FUSED, HELD)


def kept_lists(rows: LayerRows, room: int) -> tuple[Tensor, Tensor]:
    """As batched_lists.new_lists gives for all query heads, but the next layer writes over the keys: as attention in
    the same launch wants them."""
    device, entries = rows.q.device, rows.count * rows.heads
    room = min(room, rows.pages.longest)
    kept = kept_room(device, (entries * room + 1) // 2, "cis").view(torch.int32)
    return torch.empty(entries, dtype=torch.int32, device=device), kept[: entries * room].view(entries, room)


def choose(rows: LayerRows, counts: Tensor, indices: Tensor, attends: bool = False) -> Chosen:
    """What every head reads, to ``counts`` int32 [rows * heads] and ``indices`` int32 [rows * heads, room], and if it
    ``attends`` attention over that."""
    q = rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()
    count, heads, head_dim = q.shape
    kv_heads, width, device = rows.kv_heads, rows.pages.longest, q.device
    per = heads // kv_heads
    held = pad(width, 64)
    done = per * held <= HELD
    units, processors = kv_heads * count, processors_of(device)
    # Eight warps choose sooner, where as many programs of eight as there are units still run at once.
    warps = 16 if done and held > 8192 else 8 if done and held > WIDE and units <= RESIDENT // 2 * processors else 4
    keys = 128 if warps == 16 else 64
    programs = max(1, RESIDENT * 4 // warps * processors // units)
    if done and held <= WIDE and units >= processors:
        programs = 1  # the processors are busy, and pieces of so short a list cost more to merge than they save
    parts = min(programs, triton.cdiv(width, keys), MOST)
    scored, searches = torch.empty(2, count, kv_heads, dtype=torch.float64, device=device)
    chosen = Chosen(
        torch.empty(count * heads, dtype=torch.int8, device=device),
        torch.empty(count, BOUNDS, dtype=torch.int32, device=device),
        torch.empty(count, heads, width, dtype=torch.float32, device=device),
        scored,
        searches,
        done,
    )
    out = lse = part_out = part_lse = chosen.scores  # unused pointers must still be pointers
    if attends:
        out = torch.empty(q.shape, dtype=q.dtype, device=device)
        lse = torch.empty(count, heads, dtype=torch.float32, device=device)
        part_out = torch.empty(count * heads, parts, head_dim, dtype=torch.float32, device=device)
        part_lse = torch.empty(count * heads, parts, dtype=torch.float32, device=device)
        chosen = chosen._replace(out=out, lse=lse)
    _choose[(parts, kv_heads, count)](
        q,
        rows.pages.k,
        rows.pages.v,
        rows.pages.tables,
        rows.words,
        rows.reals,
        rows.cones,
        rows.pages.lengths,
        counts,
        indices,
        *chosen[:5],
        arrivals(device, count * (kv_heads + heads)),
        part_out,
        part_lse,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        *rows.pages.table_strides,
        rows.words.stride(0),
        rows.reals.stride(0),
        rows.cones.stride(0),
        indices.shape[1],
        width,
        rows.scale * LOG2E,
        rows.softcap or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=pad(per, 1),
        PER_PAD=pad(per),
        D=head_dim,
        D_PAD=pad(head_dim),
        PLACES=MOST_STEPS,
        PAGE=rows.pages.k.shape[2],
        KEYS=keys,
        HELD=held if done else 0,
        SPAN=256 if attends else 1024,
        TILE=TILE * warps if attends else 0,
        CAPPED=rows.softcap is not None,
        PRECISION=precision(q.dtype),
        WAIT=WAIT if attends else min(WAIT, 1),  # others' lists lie where the kernel before may still read
        num_warps=warps,
        num_stages=3,
        maxnreg=REGISTERS,
        **launched(device),
    )
    return chosen


@triton.jit(
    do_not_specialize=["table_stride", "table_head", "word_row", "real_row", "cone_row", "room", "width"],
    do_not_specialize_on_alignment=[
        "tables", "words", "reals", "cones", "lengths", "counts", "indices", "searching", "bounds", "scored",
        "searches", "arrived", "part_lse", "lse",
    ],
)  # fmt: skip
def _choose(
    q_ptr, k_pool, v_pool, tables, words, reals, cones, lengths, counts, indices, searching, bounds, scores, scored,
    searches, arrived, part_out, part_lse, out, lse, q_row, q_head, table_stride, table_head, word_row, real_row,
    cone_row, room, width, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PER_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PLACES: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, HELD: tl.constexpr,
    SPAN: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, WAIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # The kernel before this one stores the step's keys. Queries and the rows' words come from before it, and it has
    # waited for those. What is written before this one waits must belong to no other program: a row's state, lists in
    # kept room.
    if WAIT == 0:
        begin(EARLY)
    PER: tl.constexpr = HEADS // KV_HEADS
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(0)
    length = tl.load(lengths + row)
    low, high = hidden_at(cones, row, cone_row, length)
    own = words + row.to(tl.int64) * word_row
    reals += row.to(tl.int64) * real_row
    q_ptr += row.to(tl.int64) * q_row
    first, last, take = length, length, tl.full([], 0, tl.int32)
    at = tl.full([], 0, tl.int32)
    member = tl.arange(0, PER_PAD)
    head = kv_head * PER + member
    mine = member < PER
    grouped = tl.arange(0, GROUP)
    found = tl.full([GROUP], -2, tl.int32)  # -1: none's
    position, size = tl.zeros([GROUP], tl.int32), tl.zeros([GROUP], tl.int32)
    if length > 0:
        chooses, at, first, last, take = searchable_at(own, reals, length, low, high)
        if chooses:
            tau = tl.load(reals + R.tau).to(tl.float32)
            found, position, size = resembled(
                q_ptr, own, at, tau, kv_head * PER, PER, part == 0, q_head, HEADS, D, D_PAD, GROUP, PLACES
            )
    if WAIT == 1:
        begin(EARLY)
    whose = tl.max(tl.where(member[:, None] == grouped[None, :], found[None, :], -2), 1)
    asked = mine & (whose == -1)
    some = tl.sum(asked.to(tl.int32), 0)
    table = tables + row.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
    if TILE > 0:
        q = queries_at(q_ptr, head, mine, q_head, D, D_PAD)
    one, after, turn, turns = 0, PER, part, parts
    if PER > 1:  # noqa: SIM102 (with one head the rest must not be compiled)
        if parts >= PER:  # a share of the programs each
            one, turn, turns = part % PER, part // PER, parts // PER
            after = one + 1
    for number in tl.range(one, after):
        own_found = tl.sum(tl.where(grouped == number, found, 0), 0)
        unit = kv_head * PER + number
        entry = (row * HEADS + unit).to(tl.int64)
        if (own_found != -1) & (turn < turns):
            ids = indices + entry * room
            ahead = 0
            if TILE == 0:  # noqa: SIM102 (attention wants its keys shared out evenly)
                if (turns > 1) & (own_found >= 0):  # to look up what moved takes as long as to copy the rest
                    ahead = tl.where(tl.load(own + W.follow) >= 0, 1, 0)
            begins, ends, straight, placed = put_shared(
                turn - ahead, turns - ahead, turn == 0, own, ids, length, own_found,
                tl.sum(tl.where(grouped == number, position, 0), 0), tl.sum(tl.where(grouped == number, size, 0), 0),
                unit, first, last, low, high, HEADS, SPAN,
            )  # fmt: skip
            if WAIT == 2:
                begin(EARLY)
            if turn == 0:
                tl.store(counts + entry, placed)
            if TILE > 0:
                tl.debug_barrier()  # other threads' entries
                acc, log = attend_piece(
                    q, k_pool, v_pool, table, ids, begins, ends, straight, placed, length, kv_head, scale_log2, softcap,
                    KV_HEADS, D, D_PAD, PAGE, PER_PAD, TILE, CAPPED, PRECISION,
                )  # fmt: skip
                if turns == 1:
                    put_result(acc, log, member == number, out + entry * D, lse + entry, D, D_PAD)
                else:
                    merge_pieces(
                        acc, log, member == number, turn, turns, part_out + entry * parts * D, part_lse + entry * parts,
                        arrived + tl.num_programs(2) * KV_HEADS + entry, out + entry * D, lse + entry, D, D_PAD,
                    )  # fmt: skip
    if WAIT == 2:
        begin(EARLY)
    if part == 0:
        tl.store(searching + row * HEADS + head, asked.to(tl.int8), mask=mine)
        tl.store(scored + row * KV_HEADS + kv_head, some.to(tl.float64) * length / HEADS)
        tl.store(searches + row * KV_HEADS + kv_head, some.to(tl.float64))
        put_bounds(bounds, row, first, last, low, high, take)  # by all alike
        if length > 0:
            has = tl.load(own + W.has).to(tl.pointer_type(tl.int8))
            positions = tl.load(own + W.positions).to(tl.pointer_type(tl.int64))
            tl.store(has + at * HEADS + head, asked.to(tl.int8), mask=mine)
            tl.store(positions + at, length.to(tl.int64) - 1)
    if some > 0:
        _score(
            q_ptr, k_pool, table, scores + (row * HEADS + head).to(tl.int64)[:, None] * width, head, mine, length,
            kv_head, q_head, scale_log2, softcap, KV_HEADS, D, D_PAD, PAGE, KEYS, CAPPED, PRECISION,
        )  # fmt: skip
        if HELD > 0:
            tl.debug_barrier()  # all threads' stores come before the arrival that one of them announces
            place = arrived + row * KV_HEADS + kv_head
            others = tl.atomic_add(place, tl.full([], 1, tl.int64), sem="acq_rel", scope="gpu")
            if others == parts - 1:
                for which in tl.range(0, PER):
                    if tl.sum(tl.where(asked & (member == which), 1, 0), 0) > 0:
                        unit = kv_head * PER + which
                        line = (row * HEADS + unit).to(tl.int64)
                        placed = take_best(
                            own, reals, scores + line * width, indices + line * room, counts + line, length, at, unit,
                            first, last, low, high, take, width, HEADS, HELD,
                        )  # fmt: skip
                        if TILE > 0:
                            tl.debug_barrier()
                            acc, log = attend_piece(
                                q, k_pool, v_pool, table, indices + line * room, 0, placed, placed, placed, length,
                                kv_head, scale_log2, softcap, KV_HEADS, D, D_PAD, PAGE, PER_PAD, TILE, CAPPED,
                                PRECISION,
                            )  # fmt: skip
                            put_result(acc, log, member == which, out + line * D, lse + line, D, D_PAD)
                tl.store(place, tl.full([], 0, tl.int64))


@triton.jit
def _score(
    q_ptr, k_pool, table, out, head, mine, length, kv_head, q_head, scale_log2, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logits of the program's share of a KV head's keys. Where they lie is looked up while those before them are
    on their way, as decode.py does."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    channel = tl.arange(0, D_PAD)
    q = queries_at(q_ptr, head, mine, q_head, D, D_PAD)
    TYPE: tl.constexpr = q.dtype
    LINES: tl.constexpr = q.shape[0]
    q, rise = queries(q, k_pool, D)
    number = part * KEYS + tl.arange(0, KEYS)
    place = pool_rows(table, number, number < length, kv_head, KV_HEADS, PAGE)
    for _ in tl.range(part, tl.cdiv(length, KEYS), parts):
        k, k_scale = key_codes(k_pool, place[:, None], channel[None, :], (number < length)[:, None], D, TYPE, LINES)
        here = number
        number += parts * KEYS
        place = pool_rows(table, number, number < length, kv_head, KV_HEADS, PAGE)
        found = cap_logits(products(q, rise, k, k_scale, PRECISION), scale_log2, softcap, CAPPED)
        tl.store(out + here[None, :], found, mask=mine[:, None] & (here < length)[None, :])
