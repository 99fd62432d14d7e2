"""PSA's progressive attention with the stop decided on the device (PSA, Alg. 1; see ops/progressive.py for the rule).

Several programs serve one unit and read microbatches in turn, some turns in one go. Each publishes what a microbatch
weighs, and between its goes follows the rule over the unbroken run of microbatches published so far, by whomever. From
how the rule stands it takes how far to go next: a share of the way to where the rule will most likely hold, or all that
is left where that is nearly everything. Beyond that it holds back for a while, though no program waits for another for
good. Looking takes as long as reading several tiles, so the first go is as far as the step before went, where that is
known. Who sees the rule hold ends; the last to end says where the stop is. A second kernel merges what the rule let in:
of every program the state after its last microbatch before the stop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.layout import flat, rows
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_guesses import Guesses
from saccade.ops.triton.code_products import add_values, lines_for, no_values, products, put_sums, queries
from saccade.ops.triton.common import (
    LOG2E,
    also,
    arrivals,
    begin,
    cap_logits,
    kept_zeros,
    launched,
    pad,
    pool_places,
    precision,
    processors,
)
from saccade.ops.triton.decode import Tiles
from saccade.ops.triton.merge import merge
from saccade.ops.triton.microbatches import microbatch_keys, own_counts
from saccade.ops.triton.progressive_tiles import WINDOW, tiles_for
from saccade.ops.triton.readers import key_codes, value_codes
from saccade.ops.triton.stop_rule import follow
from saccade.selection.forms import Rule

MOST_KEYS = 512  # of one microbatch
WINDOW_AT_END = 256  # by the last program of a unit, for which all others are done
HELD_BACK = 4  # looks at what is published before a microbatch is read that the rule will most likely not want
SHARE = 4  # eighths of the way to the expected stop that are read before the next look
LONGEST = 4  # turns in one go
NEARLY = 7  # eighths: all is read in one go where the stop is expected beyond and half is read, or lay there before


class Progress(NamedTuple):
    """``out`` [batch, heads, head_dim], ``lse`` float32 [batch, heads], and of every unit [batch * kv_heads]: how many
    microbatches of its ``order`` it used (int32; the first after which the rule holds, or all), how many were ``read``
    (int32, those of ``always`` among them), and what the rule believed it had covered when it stopped (float32)."""

    out: Tensor
    lse: Tensor
    used: Tensor
    read: Tensor
    coverage: Tensor


def attend_progressive(
    q: Tensor,
    pages: Pages,
    always: Tensor,
    order: Tensor,
    size: int,
    rule: Rule,
    *,
    scale: float,
    softcap: float | None = None,
    counts: Tensor | None = None,
    epsilon: Tensor | None = None,
    before: Tensor | None = None,
    guesses: Guesses | None = None,
    readers: int | None = None,
    held_back: int | None = None,
    tiles: Tiles | None = None,
) -> Progress:
    """``q`` [batch, heads, head_dim]; ``always`` int32 [batch * kv_heads, a] and ``order`` int32 [batch * kv_heads, m]
    are block ids of ``size`` keys, ``order`` by criticality.

    ``guesses`` of the blocks of ``order``: a rule with ``rest="estimate"`` needs them, contiguous.
    ``counts`` int32 [2, batch * kv_heads]: how many entries of ``always`` and of ``order`` count for each unit, all by
    default. ``epsilon`` float32 [batch]: of each sequence, instead of the rule's. ``before`` int32 [batch, kv_heads],
    contiguous: how many microbatches each unit needed the last time, those of ``always`` among them, 0 where none
    knows; written anew. Results do not depend on it. ``readers`` programs serve each unit; by default what fills the
    device. ``tiles``: as in attend_decode.
    """
    q, always, order = rows(q), flat(always, torch.int32), flat(order, torch.int32)
    counts = None if counts is None else flat(counts, torch.int32)
    batch, heads, head_dim = q.shape
    kv_heads = pages.k.shape[1]
    units, ranked = order.shape
    group, device = heads // kv_heads, q.device
    keys, warps, stages, registers, resident = tiles or tiles_for(q, pages, size, units)
    ahead = -(-always.shape[1] // rule.microbatch)  # microbatches of `always`: they come first and never stop
    parts = ahead + -(-ranked // rule.microbatch)
    if readers is None:
        readers = max(1, min(resident * processors(device) // units, parts, WINDOW))
    row_bytes = pad(head_dim) * q.element_size()
    tile = max(size, min(keys, pad(rule.microbatch, 1) * size))
    if held_back is None:  # under the interpreter programs run one after another: it would be for nothing
        held_back = HELD_BACK if q.is_cuda else 0
    part_out = torch.empty(units, parts, group, head_dim, dtype=torch.float32, device=device)
    part_lse = torch.empty(units, parts, group, dtype=torch.float32, device=device)
    out = torch.empty(batch, heads, head_dim, dtype=q.dtype, device=device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=device)
    used = torch.empty(4, units, dtype=torch.int32, device=device)
    planes = 1
    if rule.rest == "estimate":
        assert guesses is not None
        planes = 2
    words = kept_zeros(device, planes * units * parts * group)
    _read[(readers, kv_heads, batch)](
        q, pages.k, pages.v, pages.tables, pages.lengths, always, order,
        pages.lengths if counts is None else counts,  # unused pointers must still be pointers
        lse if epsilon is None else epsilon, used if before is None else before,
        lse if guesses is None else guesses.blocks, lse if guesses is None else guesses.left, part_out, part_lse, words,
        arrivals(device, units), used, q.stride(0), q.stride(1), *pages.table_strides, scale * LOG2E, softcap or 0.0,
        rule.epsilon, rule.margin, parts, ahead, ranked, 0 if guesses is None else guesses.left.shape[2],
        always.shape[1], held_back, *pages.far, FAR=pages.host is not None, KV_HEADS=kv_heads,
        PER_PAD=lines_for(group, pages.k, q.dtype), D=head_dim, D_PAD=pad(head_dim),
        PAGE=pages.k.shape[2], SIZE=size, BLOCKS=pad(rule.microbatch, 1), TILE=tile, CAPPED=softcap is not None,
        PRECISION=precision(q.dtype), GROUP=group,
        FEW=pad(group, 256 // WINDOW),  # no two threads look at one word: they might not see the same
        MICROBATCH=rule.microbatch, LEAST=rule.rest == "min", GUESSED=planes == 2, MEAN=rule.stop == "mean",
        WINDOW=WINDOW, AT_END=WINDOW_AT_END, SHARE=SHARE, LONGEST=LONGEST, NEARLY=NEARLY, KNOWN=before is not None,
        RAGGED=counts is not None, EACH=epsilon is not None, num_warps=warps,
        num_stages=stages if row_bytes * tile <= 1 << 15 else 1,  # two tiles of keys and of values share memory
        maxnreg=registers if row_bytes <= 256 else None, **launched(device),
    )  # fmt: skip
    merge(part_out, part_lse, out, lse, programs=readers, stops=used[2], words=words, planes=planes)
    return Progress(out, lse, used[0], used[1], used[3].view(torch.float32))


@triton.jit(
    do_not_specialize=[
        "table_stride", "table_head", "margin", "parts", "ahead", "ranked", "left_row", "always_each", "held_back",
        "far_k", "far_v",
    ],
    do_not_specialize_on_alignment=["epsilons", "before", "guesses", "lefts"],
)  # fmt: skip
def _read(
    q_ptr, k_pool, v_pool, tables, lengths, always, order, counts, epsilons, before, guesses, lefts, part_out, part_lse,
    published, arrived, used, q_batch, q_head, table_stride, table_head, scale_log2, softcap, epsilon, margin, parts,
    ahead, ranked, left_row, always_each, held_back, far_k, far_v, FAR: tl.constexpr,
    KV_HEADS: tl.constexpr, PER_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, FEW: tl.constexpr, MICROBATCH: tl.constexpr, LEAST: tl.constexpr, GUESSED: tl.constexpr,
    MEAN: tl.constexpr, WINDOW: tl.constexpr, AT_END: tl.constexpr, SHARE: tl.constexpr, LONGEST: tl.constexpr,
    NEARLY: tl.constexpr, KNOWN: tl.constexpr, RAGGED: tl.constexpr, EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    TILES: tl.constexpr = BLOCKS * SIZE // TILE  # of a microbatch
    reader, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    readers = tl.num_programs(0)
    units = KV_HEADS * tl.num_programs(2)
    unit = batch * KV_HEADS + kv_head
    length = tl.load(lengths + batch)
    if EACH:
        epsilon = tl.load(epsilons + batch)
    table = tables + batch.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head
    always += unit.to(tl.int64) * always_each
    order += unit.to(tl.int64) * ranked
    part_out += unit.to(tl.int64) * parts * GROUP * D
    part_lse += unit.to(tl.int64) * parts * GROUP
    PLANES: tl.constexpr = 2 if GUESSED else 1
    words = published + unit.to(tl.int64) * parts * GROUP * PLANES
    more = words + parts * GROUP
    guess_row = ranked
    guesses += unit.to(tl.int64) * GROUP * guess_row
    lefts += unit.to(tl.int64) * GROUP * left_row
    if RAGGED:
        always_each, ranked, ahead, parts = own_counts(counts, unit, units, MICROBATCH)
    head = tl.arange(0, PER_PAD)
    mine = head < GROUP
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + batch.to(tl.int64) * q_batch + (kv_head * GROUP + head)[:, None] * q_head + channel[None, :],
        mask=mine[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    cursor, found, aim = 0, 0, readers - 1  # until more is known, the first turn is wanted
    if KNOWN:
        # All programs take as many turns: who has one less would wait for the others.
        aim = tl.maximum(aim, tl.minimum(tl.cdiv(tl.load(before + unit), readers) * readers, parts) - 1)
    covered = tl.full([], 1.0, tl.float32)
    anchor = tl.zeros([FEW], tl.float32)
    total = tl.zeros([FEW], tl.float64)
    least = tl.full([FEW], float("inf"), tl.float32)
    excess, squares = tl.zeros([FEW], tl.float64), tl.zeros([FEW], tl.float64)
    part, looks, turns = reader, 0, 0
    key = microbatch_keys(part, 0, always, order, ahead, always_each, ranked, length, SIZE, TILE, MICROBATCH)
    valid = key < length
    k_row, v_row = pool_places(table, key, valid, kv_head, far_k, far_v, KV_HEADS, PAGE, FAR)
    key = microbatch_keys(
        part + 1 // TILES * readers, 1 % TILES * TILE, always, order, ahead, always_each, ranked, length, SIZE, TILE,
        MICROBATCH,
    )  # fmt: skip
    TYPE: tl.constexpr = q.dtype
    q, rise = queries(q, k_pool, D)
    acc, odd_acc, grain = no_values(v_pool, PER_PAD, D, D_PAD, TYPE)
    weight = tl.zeros([PER_PAD], tl.float32)  # of all read
    own = tl.zeros([PER_PAD], tl.float32)  # of the microbatch at hand
    top = tl.full([PER_PAD], float("-inf"), tl.float32)
    rest = tl.zeros([PER_PAD], tl.float32)
    pivot, apart = tl.zeros([PER_PAD], tl.float32), tl.zeros([PER_PAD], tl.float32)
    while (part < parts) & (found == 0):
        followed = cursor
        if turns > 0:
            cursor, anchor, total, least, excess, squares, aim, found, covered = follow(
                words, more, lefts, margin, cursor, anchor, total, least, excess, squares, aim, covered, epsilon,
                parts, ahead, ranked, left_row, GROUP, FEW, MICROBATCH, LEAST, GUESSED, MEAN, WINDOW,
            )  # fmt: skip
        behind = (cursor - followed) // WINDOW  # 1 where more is published than was looked at: that comes first
        left = tl.cdiv(parts - part, readers)  # of this program's turns
        wanted = (aim - part + readers) // readers  # of those, until the rule will most likely hold
        wanted = tl.where(turns == 0, wanted, tl.minimum(tl.cdiv(wanted * SHARE, 8), LONGEST))
        wanted = tl.where(part > aim, tl.where(looks > held_back, 1, 0), wanted)
        sure = (2 * part >= parts) | ((turns == 0) & (aim >= readers))
        wanted = tl.where(sure & ((aim + 1) * 8 >= parts * NEARLY), left, wanted)
        wanted = tl.where((found > 0) | (behind > 0), 0, tl.minimum(wanted, left))
        # As in decode.py, only what products read may be stages of the pipeline, hence no num_stages here.
        for step in tl.range(0, wanted * TILES):
            start = step % TILES * TILE
            k, k_scale = key_codes(k_pool, k_row[:, None], channel[None, :], valid[:, None], D, TYPE, PER_PAD)
            v, odd, v_scale = value_codes(
                v_pool, v_row[:, None], channel[None, :], valid[:, None], D, D_PAD, TYPE, PER_PAD
            )
            seen = valid
            # Where the next keys lie is looked up a tile ahead, at the end those of the next turn, and their numbers
            # one tile before that.
            valid = key < length
            k_row, v_row = pool_places(table, key, valid, kv_head, far_k, far_v, KV_HEADS, PAGE, FAR)
            key = microbatch_keys(
                part + (step + 2) // TILES * readers, (step + 2) % TILES * TILE, always, order, ahead, always_each,
                ranked, length, SIZE, TILE, MICROBATCH,
            )  # fmt: skip
            scores = cap_logits(products(q, rise, k, k_scale, PRECISION), scale_log2, softcap, CAPPED)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            if GUESSED:
                tops = tl.max(tl.reshape(scores, [PER_PAD, TILE // SIZE, SIZE]), 2)
                higher = tl.maximum(top, tl.max(tops, 1))
            else:
                higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(top - base)
            p = tl.exp2(scores - base[:, None])
            by_block = tl.sum(tl.reshape(p, [PER_PAD, TILE // SIZE, SIZE]), 2)
            new = tl.sum(by_block, 1)
            weight = weight * shrink + new
            acc, odd_acc, grain = add_values(acc, odd_acc, grain, shrink, p, v, odd, v_scale, PRECISION)
            top = higher
            at = part + step // TILES * readers
            own = tl.where(start == 0, 0.0, own * shrink) + new
            if GUESSED:
                among = start // SIZE + tl.arange(0, TILE // SIZE)
                entry = (at - ahead) * MICROBATCH + among
                listed = mine[:, None] & also((among < MICROBATCH) & (entry < ranked), at >= ahead)[None, :]
                guess = tl.load(guesses + head[:, None] * guess_row + entry[None, :], mask=listed, other=0.0)
                # Of a block too light for float32 beside the others its heaviest key stands for it.
                above = tl.maximum(base[:, None] + tl.log2(tl.maximum(by_block, 1.2e-38)), tops) - guess
                first = tl.sum(tl.where(listed & (among == 0)[None, :], above, 0.0), 1)
                pivot = tl.where(start == 0, first, pivot)  # sums count from the first one: they lie close together
                above = tl.where(listed, above - pivot[:, None], 0.0)
                rest = tl.where(start == 0, 0.0, rest) + tl.sum(above, 1)
                apart = tl.where(start == 0, 0.0, apart) + tl.sum(above * above, 1)
            elif LEAST:
                among = start // SIZE + tl.arange(0, TILE // SIZE)
                among = (among < MICROBATCH) & ((at - ahead) * MICROBATCH + among < ranked)
                lightest = tl.min(tl.where(among[None, :], by_block, float("inf")), 1)
                rest = tl.minimum(tl.where(start == 0, float("inf"), rest), base + tl.log2(lightest))
            else:
                rest = tl.maximum(tl.where(start == 0, float("-inf"), rest), base + tl.log2(tl.max(by_block, 1)))
            ends = also(mine, start == (TILES - 1) * TILE)  # a microbatch
            log = top + tl.log2(own)  # a listed block has a key, so a microbatch weighs something
            place = at * GROUP + head
            beside = rest
            if GUESSED:
                count = tl.maximum(tl.minimum(MICROBATCH, ranked - (at - ahead) * MICROBATCH), 1).to(tl.float32)
                beside = pivot + rest / count
                spread = tl.maximum(apart - rest * rest / count, 0.0)
                second = (spread.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)
                tl.store(more + place, second, mask=ends)
            word = (log.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (
                beside.to(tl.int32, bitcast=True).to(tl.int64) << 32
            )
            tl.store(words + place, tl.where(word == 0, 1, word), mask=ends)
            tl.store(part_lse + place, top + tl.log2(weight), mask=ends)
            put_sums(part_out + place[:, None] * D, acc, odd_acc, grain, 1.0 / weight, ends[:, None], D, D_PAD)
        part += wanted * readers
        turns += wanted
        looks = tl.where(wanted > 0, 0, looks + 1 - behind)
    tl.debug_barrier()  # all threads' stores come before the arrival that one of them announces
    others = tl.atomic_add(arrived + unit, (tl.cast(turns, tl.int64) << 32) + 1, sem="acq_rel", scope="gpu")
    if (others & 0xFFFFFFFF) == readers - 1:
        while (found == 0) & (cursor < parts):  # all was read before this program saw the rule hold
            cursor, anchor, total, least, excess, squares, aim, found, covered = follow(
                words, more, lefts, margin, cursor, anchor, total, least, excess, squares, aim, covered, epsilon,
                parts, ahead, ranked, left_row, GROUP, FEW, MICROBATCH, LEAST, GUESSED, MEAN, AT_END,
            )  # fmt: skip
        found = tl.where(found == 0, parts, found)
        tl.store(used + unit, found - ahead)
        tl.store(used + units + unit, (others >> 32).to(tl.int32) + turns)
        tl.store(used + 2 * units + unit, found)
        if KNOWN:
            tl.store(before + unit, found)
        tl.store(used + 3 * units + unit, covered.to(tl.int32, bitcast=True))
        tl.store(arrived + unit, tl.cast(0, tl.int64))
