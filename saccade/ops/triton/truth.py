"""True attention of single KV heads of a batch's rows, beside what a step gave for them: all places that audits drew of
one step in two launches, read where queries, results and keys lie.

A program reads one share of a place's keys, as decode does (``decode.py``); a second kernel merges the shares and
compares. Products of 16-bit queries and keys are exact, all else is float32: a weight is multiplied with 16-bit values
in three parts, which add up to it. A tensor core multiplies 16 rows at once, and most groups have few: the parts are
rows of one product then. The sum of weight times norm of value is added up with the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.row_words import AuditPlace, TapWords
from saccade.ops.triton.batch import Pages, even_splits
from saccade.ops.triton.common import LOG2E, TYPES, begin, cap_logits, launched, pad, pool_rows, precision, processors
from saccade.ops.triton.readers import load_keys, load_values
from saccade.ops.triton.state_words import places as places_of

KEYS = 64  # of a tile, where a head has few bytes
STAGES = 3  # tiles on their way
RESIDENT = 3  # programs on a processor
WARPS = 4  # of a program
STACKED = 8  # heads of a group at most, whose weights' parts are rows of one product
MOST_SPLITS = 128  # of a place's keys
MERGED = 1 << 13  # numbers of shares that are merged at once
TINY = torch.finfo(torch.float32).tiny
P, T = places_of(AuditPlace), places_of(TapWords)
PLACE: tl.constexpr = tl.constexpr(len(AuditPlace._fields))
TAP: tl.constexpr = tl.constexpr(len(TapWords._fields))


class Given(NamedTuple):
    """What attention was asked and gave in each layer and row. ``addresses`` int64 [layers, rows, 6]: TapWords, of
    queries and results of ``dtype`` and fp32 log-sum-exps of ``heads``."""

    addresses: Tensor
    dtype: torch.dtype
    heads: int


def compare(
    places: Tensor,
    given: Given,
    pages: Pages,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """What steps lost at ``places`` int32 [n, 4], an AuditPlace each, of what attention was
    ``given`` and gave; ``pages.tables`` int32 [layers, >= rows, kv_heads or 1, blocks] and ``lengths`` [>= rows].

    Returns fp32 [n, 3]: retained mass, error of the output and the same scaled (``engine.watch.audit``), means over the
    KV head's query heads of values that are 1 at most; NaN where numbers are not finite."""
    device, rows, all_rows = places.device, given.addresses.shape[1], pages.tables.shape[1]
    count, kv_heads, head_dim = len(places), pages.k.shape[1], pages.head_dim
    group, halves = given.heads // kv_heads, given.dtype.itemsize == 2
    small = halves and head_dim <= 128
    keys = KEYS if small else KEYS // 2
    splits = even_splits(
        count, RESIDENT * processors(device), max(1, min(-(-pages.longest // (3 * keys)), MOST_SPLITS))
    )
    parts = torch.empty(count, splits, group, head_dim + 2, dtype=torch.float32, device=device)
    found = torch.empty(count, 3, dtype=torch.float32, device=device)
    own = pad(group, 1)
    stacked = halves and own <= STACKED
    sizes = {"GROUP": group, "D": head_dim, "D_PAD": pad(head_dim), "TYPE": TYPES[given.dtype]}
    _parts[(splits, count)](
        places, given.addresses, pages.k, pages.v, pages.tables, pages.lengths, parts, rows, all_rows,
        *pages.tables.shape[2:], scale * LOG2E, softcap or 0.0, KV_HEADS=kv_heads, PAGE=pages.k.shape[2], KEYS=keys,
        OWN=own, GROUP_PAD=max(pad(group), 4 * own if stacked else 0), CAPPED=softcap is not None,
        PRECISION=precision(given.dtype), HALVES=halves, STACKED=stacked, num_warps=WARPS,
        num_stages=STAGES if small else 2, **sizes,
    )  # fmt: skip
    at_once = max(1, MERGED // own // pad(head_dim))
    _compare[(count,)](
        places, given.addresses, parts, found, rows, splits, GROUP_PAD=own, SPLITS=at_once, TINY=TINY, num_warps=4,
        **launched(device), **sizes,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["rows", "all_rows", "table_rows", "blocks"])
def _parts(
    places, given, k_pool, v_pool, tables, lengths, parts, rows, all_rows, table_rows, blocks, scale_log2, softcap,
    GROUP: tl.constexpr, OWN: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    TYPE: tl.constexpr, HALVES: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """``OWN`` rows, of which ``GROUP`` are heads; where ``STACKED``, as many again for each part of a weight."""
    split, place = tl.program_id(0), tl.program_id(1)
    splits = tl.num_programs(0)
    own_place = places + place * PLACE
    layer, row = tl.load(own_place + P.layer), tl.load(own_place + P.row)
    kv_head, window = tl.load(own_place + P.kv_head), tl.load(own_place + P.window)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    table = (
        tables + ((layer.to(tl.int64) * all_rows + row) * table_rows + tl.where(table_rows > 1, kv_head, 0)) * blocks
    )
    line, channel = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    member, part = line % OWN, line // OWN
    inside = (member[:, None] < GROUP) & (channel[None, :] < D)
    entry = given + (layer.to(tl.int64) * rows + row) * TAP
    asked = tl.load(entry + T.q).to(tl.pointer_type(TYPE)) + (kv_head * GROUP + member)[:, None] * tl.load(
        entry + T.q_head
    )
    q = tl.load(asked + channel[None, :], mask=inside, other=0.0)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    weight = tl.zeros([GROUP_PAD], tl.float32)
    scaled = tl.zeros([GROUP_PAD], tl.float32)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    number = first + split * KEYS + tl.arange(0, KEYS)
    row_of = pool_rows(table, number, number < length, kv_head, KV_HEADS, PAGE)
    for _ in tl.range(split, tl.cdiv(length - first, KEYS), splits):
        seen = number < length
        k = load_keys(k_pool, row_of[:, None], channel[None, :], seen[:, None], D, TYPE)
        v = load_values(v_pool, row_of[:, None], channel[None, :], seen[:, None], D, TYPE)
        number += splits * KEYS  # looked up while this tile is on its way, as in decode
        row_of = pool_rows(table, number, number < length, kv_head, KV_HEADS, PAGE)
        scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - anchor)
        p = tl.exp2(scores - anchor[:, None])
        wide = v.to(tl.float32)
        norm = tl.sqrt(tl.sum(wide * wide, 1))
        weight = weight * shrink + tl.sum(p, 1)
        scaled = scaled * shrink + tl.sum(p * norm[None, :], 1)
        acc = acc * shrink[:, None]
        if HALVES:
            rest = p * 32768.0  # float16 has no small numbers, and none beyond 65504
            own = tl.zeros([GROUP_PAD, KEYS], v.dtype)
            for turn in tl.static_range(3):
                cut = rest.to(v.dtype)
                rest -= cut.to(tl.float32)
                if STACKED:
                    own = tl.where(part[:, None] == turn, cut, own)
                else:
                    acc = tl.dot(cut, v, acc)
            if STACKED:
                acc = tl.dot(own, v, acc)
        else:
            acc = tl.dot(p, v, acc, input_precision="tf32x3")
        top = higher
    if HALVES:
        acc = acc / 32768.0
    total = tl.where(weight == 0.0, 1.0, weight)
    acc = acc / total[:, None]
    to = parts + ((place.to(tl.int64) * splits + split) * GROUP + member) * (D + 2)
    mine = (member < GROUP) & (part == 0)
    if STACKED:
        acc = tl.sum(tl.reshape(acc, [GROUP_PAD // OWN, OWN, D_PAD]), 0)
        head = tl.arange(0, OWN)
        out = parts + ((place.to(tl.int64) * splits + split) * GROUP + head)[:, None] * (D + 2) + channel[None, :]
        tl.store(out, acc, mask=(head[:, None] < GROUP) & (channel[None, :] < D))
    else:
        tl.store(to[:, None] + channel[None, :], acc, mask=inside & (part[:, None] == 0))
    tl.store(to + D, tl.where(weight == 0.0, float("-inf"), top + tl.log2(total)), mask=mine)
    tl.store(to + D + 1, scaled / total, mask=mine)


@triton.jit(do_not_specialize=["rows", "splits"])
def _compare(
    places, addresses, parts, found, rows, splits,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
    TINY: tl.constexpr, TYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    place = tl.program_id(0)
    own_place = places + place * PLACE
    layer, row, kv_head = tl.load(own_place + P.layer), tl.load(own_place + P.row), tl.load(own_place + P.kv_head)
    member, channel = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    mine = member < GROUP
    inside = mine[:, None] & (channel[None, :] < D)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    weight = tl.zeros([GROUP_PAD], tl.float32)
    scaled = tl.zeros([GROUP_PAD], tl.float32)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    for first in tl.range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        here = (split < splits)[:, None] & mine[None, :]
        at = parts + ((place.to(tl.int64) * splits + split)[:, None] * GROUP + member[None, :]) * (D + 2)
        log = tl.load(at + D, mask=here, other=float("-inf"))
        norm = tl.load(at + D + 1, mask=here, other=0.0)
        out = tl.load(
            at[:, :, None] + channel[None, None, :], mask=here[:, :, None] & (channel[None, None, :] < D), other=0.0
        )
        higher = tl.maximum(top, tl.max(log, 0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, p = tl.exp2(top - anchor), tl.exp2(log - anchor[None, :])
        acc = acc * shrink[:, None] + tl.sum(p[:, :, None] * out, 0)
        scaled = scaled * shrink + tl.sum(p * norm, 0)
        weight = weight * shrink + tl.sum(p, 0)
        top = higher
    total = tl.where(weight == 0.0, 1.0, weight)
    true = acc / total[:, None]
    entry, head = addresses + (layer.to(tl.int64) * rows + row) * TAP, kv_head * GROUP + member
    out = tl.load(entry + T.out).to(tl.pointer_type(TYPE)) + head[:, None] * tl.load(entry + T.out_head)
    given = tl.load(out + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    off = tl.sqrt(tl.sum((given - true) * (given - true), 1))
    norm, scale = tl.sqrt(tl.sum(true * true, 1)), scaled / total
    error = off / tl.where(norm < TINY, TINY, norm)  # not maximum, which takes NaN for a small number
    scaled = off / tl.where(scale < TINY, TINY, scale)
    lse = tl.load(entry + T.lse).to(tl.pointer_type(tl.float32)) + head * tl.load(entry + T.lse_head)
    read = tl.load(lse, mask=mine, other=float("-inf"))
    mass = tl.exp2(read * 1.4426950408889634 - (top + tl.log2(total)))
    to = found + place * 3
    tl.store(to, tl.sum(tl.where(mine, tl.where(mass > 1.0, 1.0, mass), 0.0)) / GROUP)
    tl.store(to + 1, tl.sum(tl.where(mine, tl.where(error > 1.0, 1.0, error), 0.0)) / GROUP)
    tl.store(to + 2, tl.sum(tl.where(mine, tl.where(scaled > 1.0, 1.0, scaled), 0.0)) / GROUP)
