"""PSA's progressive attention with the stop decided on the device (PSA, Alg. 1; see ops/progressive.py for the rule).

Several programs serve one unit and read microbatches in turn. Each publishes what a microbatch weighs, and follows the
rule over the unbroken run of microbatches published so far, by whomever, while keys of its own are on their way. Who
sees the rule hold ends; a second kernel merges what the rule let in and leaves out what was read beyond it. Near the
end a program holds back what the rule will most likely not want, for a while: nobody waits for anybody for good.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.common import LN2, LOG2E, also, cap_logits, pad, pool_rows, precision, processors
from saccade.ops.triton.decode import Pages
from saccade.ops.triton.stop_rule import follow, log_of

MOST_KEYS = 512  # of one microbatch: it is one tile
WINDOW = 64  # published microbatches looked at in one go
HELD_BACK = 4  # looks at what is published before a microbatch is read that the rule will most likely not want


@dataclass(frozen=True)
class Rule:
    """``Ranking``'s stopping rule: see selection/blocks.py."""

    epsilon: float
    microbatch: int
    rest: str
    stop: str


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
    readers: int | None = None,
    held_back: int | None = None,
    keys: int = 64,
    stages: int = 2,
    registers: int | None = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``q`` [batch, heads, head_dim]; ``always`` int32 [batch * kv_heads, a] and ``order`` int32 [batch * kv_heads, m]
    are block ids of ``size`` keys, ``order`` by criticality. Returns ``out`` like q, ``lse`` float32 [batch, heads],
    how many microbatches each unit used, int32 [batch * kv_heads]: the first after which the rule holds, or all; and
    what was published, int64 [batch * kv_heads, microbatches * group]: not 0 where a microbatch was read.

    ``counts`` int32 [2, batch * kv_heads], contiguous: how many entries of ``always`` and of ``order`` count for each
    unit, all by default. ``readers`` programs serve each unit; by default what fills the device, on which four programs
    of so few ``registers`` share a processor.
    """
    batch, heads, head_dim = q.shape
    kv_heads = pages.k.shape[1]
    units, ranked = order.shape
    group, device = heads // kv_heads, q.device
    ahead = -(-always.shape[1] // rule.microbatch)  # microbatches of `always`: they come first and never stop
    parts = ahead + -(-ranked // rule.microbatch)
    if readers is None:
        readers = max(1, min(4 * processors(device) // units, parts, WINDOW))
    row_bytes = pad(head_dim) * q.element_size()
    tile = max(size, min(keys, pad(rule.microbatch, 1) * size))
    if held_back is None:  # under the interpreter programs run one after another: it would be for nothing
        held_back = HELD_BACK if q.is_cuda else 0
    part_out = torch.empty(batch, heads, parts, head_dim, dtype=torch.float32, device=device)
    published = torch.zeros(units, parts * group + 1, dtype=torch.int64, device=device)  # weights; last, the stop or 0
    rule_of = (rule.epsilon, parts, ahead, ranked)
    each = published if counts is None else counts  # unused pointers must still be pointers
    static = {
        "GROUP": group,
        "FEW": pad(group, 256 // WINDOW),  # no two threads look at one word: they might not see the same
        "MICROBATCH": rule.microbatch,
        "LEAST": rule.rest == "min",
        "MEAN": rule.stop == "mean",
        "WINDOW": WINDOW,
        "RAGGED": counts is not None,
    }
    _read[(readers, kv_heads, batch)](
        q,
        pages.k,
        pages.v,
        pages.tables,
        pages.lengths,
        always.contiguous(),
        order.contiguous(),
        each,
        part_out,
        published,
        q.stride(0),
        q.stride(1),
        pages.tables.stride(0),
        scale * LOG2E,
        softcap or 0.0,
        *rule_of,
        always.shape[1],
        held_back,
        KV_HEADS=kv_heads,
        PER_PAD=pad(group),
        D=head_dim,
        D_PAD=pad(head_dim),
        PAGE=pages.k.shape[2],
        SIZE=size,
        BLOCKS=pad(rule.microbatch, 1),
        TILE=tile,
        CAPPED=softcap is not None,
        PRECISION=precision(q.dtype),
        **static,
        STAGES=stages if row_bytes * tile <= 1 << 15 else 1,  # two tiles of keys and of values share memory
        num_warps=4,
        maxnreg=registers if row_bytes <= 256 else None,
    )
    out = torch.empty(batch, heads, head_dim, dtype=q.dtype, device=device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=device)
    used = torch.empty(units, dtype=torch.int32, device=device)
    _merge_used[(batch * heads,)](
        part_out,
        published,
        out,
        lse,
        used,
        each,
        *rule_of,
        **static,
        D=head_dim,
        D_PAD=pad(head_dim),
        PARTS=32,
        LN2=LN2,
        num_warps=4,
    )
    return out, lse, used, published[:, :-1]


@triton.jit
def _own(counts, unit, units, MICROBATCH: tl.constexpr):
    """What there is for one unit: blocks always read, ranked ones, microbatches of the former and of both."""
    listed, ranked = tl.load(counts + unit), tl.load(counts + units + unit)
    ahead = tl.cdiv(listed, MICROBATCH)
    return listed, ranked, ahead, ahead + tl.cdiv(ranked, MICROBATCH)


@triton.jit
def _places(
    part, start, always, order, ahead, always_each, ranked, table, length, kv_head,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, MICROBATCH: tl.constexpr,
):  # fmt: skip
    """Pool rows of a tile of keys, those of microbatch ``part`` from ``start`` on, and which there are."""
    number = start + tl.arange(0, TILE)
    entry = part * MICROBATCH + number // SIZE
    in_first = also((number // SIZE < MICROBATCH) & (entry < always_each), part < ahead)
    block = tl.load(always + entry, mask=in_first, other=0)
    entry -= ahead * MICROBATCH
    in_order = also((number // SIZE < MICROBATCH) & (entry < ranked), part >= ahead)
    block += tl.load(order + entry, mask=in_order, other=0)
    key = block * SIZE + number % SIZE
    valid = (in_first | in_order) & (key < length)
    return pool_rows(table, key, valid, kv_head, KV_HEADS, PAGE), valid


@triton.jit(do_not_specialize=["table_stride", "parts", "ahead", "ranked", "always_each", "held_back"])
def _read(
    q_ptr, k_pool, v_pool, tables, lengths, always, order, counts, part_out, published, q_batch, q_head, table_stride,
    scale_log2, softcap, epsilon, parts, ahead, ranked, always_each, held_back,
    KV_HEADS: tl.constexpr, PER_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, FEW: tl.constexpr, MICROBATCH: tl.constexpr, LEAST: tl.constexpr, MEAN: tl.constexpr,
    WINDOW: tl.constexpr, RAGGED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    unit = batch * KV_HEADS + kv_head
    length = tl.load(lengths + batch)
    table = tables + batch.to(tl.int64) * table_stride
    always += unit.to(tl.int64) * always_each
    order += unit.to(tl.int64) * ranked
    most = parts
    if RAGGED:
        always_each, ranked, ahead, parts = _own(counts, unit, KV_HEADS * tl.num_programs(2), MICROBATCH)
    head = tl.arange(0, PER_PAD)
    mine = head < GROUP
    channel = tl.arange(0, D_PAD)
    q = tl.load(
        q_ptr + batch.to(tl.int64) * q_batch + (kv_head * GROUP + head)[:, None] * q_head + channel[None, :],
        mask=mine[:, None] & (channel[None, :] < D),
        other=0.0,
    )
    words = published + unit.to(tl.int64) * (most * GROUP + 1)
    cursor, found, aim = 0, 0, tl.num_programs(0) - 1  # until more is known, the first turn is wanted
    anchor = tl.zeros([FEW], tl.float32)
    total = tl.zeros([FEW], tl.float64)
    least = tl.full([FEW], float("inf"), tl.float32)
    readers = tl.num_programs(0)
    every = tl.maximum(tl.minimum(WINDOW // readers, 4), 1)  # turns between looks while the end is far
    part, turn, looks = tl.program_id(0), 0, 0
    row, valid = _places(
        part, 0, always, order, ahead, always_each, ranked, table, length, kv_head, KV_HEADS, PAGE, SIZE, TILE,
        MICROBATCH,
    )  # fmt: skip
    while (part < parts) & (found == 0):
        if (turn > 0) & ((cursor <= ahead) | (part + readers > aim) | (turn % every == 0)):
            cursor, anchor, total, least, aim, found = follow(
                words, cursor, anchor, total, least, aim, epsilon, parts, ahead, ranked, GROUP, FEW, MICROBATCH, LEAST,
                MEAN, WINDOW,
            )  # fmt: skip
            looks += 1
        if (found == 0) & ((part <= aim) | (looks > held_back)):
            acc = tl.zeros([PER_PAD, D_PAD], tl.float32)
            weight = tl.zeros([PER_PAD], tl.float32)
            top = tl.full([PER_PAD], float("-inf"), tl.float32)
            rest = tl.full([PER_PAD], float("inf") if LEAST else float("-inf"), tl.float32)
            for start in tl.range(0, BLOCKS * SIZE, TILE, num_stages=STAGES):
                seen = valid
                there = seen[:, None] & (channel[None, :] < D)
                offset = row[:, None] * D + channel[None, :]
                k = tl.load(k_pool + offset, mask=there, other=0.0)
                # Where the next keys lie is looked up a tile ahead, at the end those of the next turn.
                after = (start + TILE) % (BLOCKS * SIZE)
                row, valid = _places(
                    tl.where(after > 0, part, part + readers), after, always, order, ahead, always_each, ranked, table,
                    length, kv_head, KV_HEADS, PAGE, SIZE, TILE, MICROBATCH,
                )  # fmt: skip
                scores = cap_logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale_log2, softcap, CAPPED)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                shrink = tl.exp2(top - base)
                p = tl.exp2(scores - base[:, None])
                weight = weight * shrink + tl.sum(p, 1)
                v = tl.load(v_pool + offset, mask=there, other=0.0)
                acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
                top = higher
                by_block = tl.sum(tl.reshape(p, [PER_PAD, TILE // SIZE, SIZE]), 2)
                if LEAST:
                    among = start // SIZE + tl.arange(0, TILE // SIZE)
                    among = (among < MICROBATCH) & ((part - ahead) * MICROBATCH + among < ranked)
                    lightest = tl.min(tl.where(among[None, :], by_block, float("inf")), 1)
                    rest = tl.minimum(rest, base + tl.log2(lightest))
                else:
                    rest = tl.maximum(rest, base + tl.log2(tl.max(by_block, 1)))
            log = top + tl.log2(weight)  # a listed block has a key, so a microbatch weighs something
            word = (log.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (
                rest.to(tl.int32, bitcast=True).to(tl.int64) << 32
            )
            tl.store(words + part * GROUP + head, tl.where(word == 0, 1, word), mask=mine)
            place = (unit * GROUP + head).to(tl.int64) * most + part
            tl.store(
                part_out + place[:, None] * D + channel[None, :],
                acc / weight[:, None],
                mask=mine[:, None] & (channel[None, :] < D),
            )
            part += readers
            turn += 1
            looks = 0
    if found > 0:
        tl.store(words + most * GROUP, tl.cast(found, tl.int64))  # whoever stores it, it is the same


@triton.jit(do_not_specialize=["parts", "ahead", "ranked"])
def _merge_used(
    part_out, published, out, lse, used, counts, epsilon, parts, ahead, ranked,
    GROUP: tl.constexpr, FEW: tl.constexpr, MICROBATCH: tl.constexpr, LEAST: tl.constexpr, MEAN: tl.constexpr,
    WINDOW: tl.constexpr, RAGGED: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PARTS: tl.constexpr,
    LN2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    most = parts
    words = published + row // GROUP * (most * GROUP + 1)
    found = tl.load(words + most * GROUP).to(tl.int32)
    if RAGGED:
        _, ranked, ahead, parts = _own(counts, row // GROUP, tl.num_programs(0) // GROUP, MICROBATCH)
    cursor, aim = 0, parts
    anchor = tl.zeros([FEW], tl.float32)
    total = tl.zeros([FEW], tl.float64)
    least = tl.full([FEW], float("inf"), tl.float32)
    while (found == 0) & (cursor < parts):  # all was read before anybody saw the rule hold
        cursor, anchor, total, least, aim, found = follow(
            words, cursor, anchor, total, least, aim, epsilon, parts, ahead, ranked, GROUP, FEW, MICROBATCH, LEAST,
            MEAN, WINDOW,
        )  # fmt: skip
    found = tl.where(found == 0, parts, found)
    if row % GROUP == 0:
        tl.store(used + row // GROUP, found - ahead)
    channel = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    weight = 0.0
    top = float("-inf")
    for first in tl.range(0, found, PARTS, num_stages=4):
        part = first + tl.arange(0, PARTS)
        logs = log_of(tl.load(words + part * GROUP + row % GROUP, mask=part < found, other=0))
        logs = tl.where(part < found, logs, float("-inf"))
        rows = tl.load(
            part_out + (row * most + part)[:, None] * D + channel[None, :],
            mask=(part < found)[:, None] & (channel[None, :] < D),
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(logs, 0))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(logs - higher)
        acc = acc * shrink + tl.sum(p[:, None] * rows, 0)
        weight = weight * shrink + tl.sum(p, 0)
        top = higher
    read = tl.where(weight == 0.0, 1.0, weight)  # a unit may have nothing to read
    tl.store(out + row * D + channel, (acc / read).to(out.dtype.element_ty), mask=channel < D)
    tl.store(lse + row, (top + tl.log2(read)) * LN2)
