"""Labels of many rows (methods/labels/store.py): each row's new key is labelled, and blocks are guessed to weigh what
their keys do by their labels, for each query head. A row's words are KeyWords (ops/row_words.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.row_words import KeyWords
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_guesses import Estimates, add_guesses, put_sums
from saccade.ops.triton.common import also, begin, launched, pad, pool_rows, processors
from saccade.ops.triton.readers import load_keys
from saccade.ops.triton.state_words import places
from saccade.selection.readings import Choice

W = places(KeyWords)
TILE = 128  # keys that are scored in one go: the largest block
PARTS = 4  # rows of a product that one query takes: three bfloat16 numbers that sum up to float32's, and none


def label_keys(pages: Pages, words: Tensor, channels: int, bits: int) -> None:
    """Label the last key of each row by ``channels`` of its channels in ``bits`` each (16: as they are)."""
    kv_heads = pages.k.shape[1]
    _label[(kv_heads, len(words))](
        pages.k, pages.tables, pages.lengths, words, *pages.table_strides, words.stride(0), KV_HEADS=kv_heads,
        D=pages.k.shape[3], PAGE=pages.k.shape[2], COUNT=channels, HALF=pad((channels + 1) // 2, 1), BITS=bits,
        num_warps=1, **launched(words.device),
    )  # fmt: skip


def estimate_labelled(
    q: Tensor,
    pages: Pages,
    words: Tensor,
    choice: Choice,
    dense_upto: Tensor,
    scale: float,
    softcap: float | None,
) -> Estimates:
    """Label the last key of each row by all its channels, and guess by the labels of the keys before what the blocks
    that ``choice`` ranks weigh, for ``q`` [rows, heads, head_dim] (estimates.py, Labels.block_weights). As many blocks
    as ``pages.longest`` keys make have a place. What is said of other blocks, and of rows of up to ``dense_upto`` keys
    (int32 [rows]), means nothing."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    rows, heads, head_dim = q.shape
    kv_heads, blocks, device = pages.k.shape[1], -(-pages.longest // choice.size), q.device
    estimates = torch.empty(rows, heads, blocks, dtype=torch.float32, device=device)
    tiles = triton.cdiv(blocks * choice.size, TILE)
    splits = max(1, min(tiles, triton.cdiv(8 * processors(device), kv_heads * rows)))
    members = triton.next_power_of_2(heads // kv_heads)
    half = pad(head_dim // 2)
    sums = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=device)
    _estimate[(splits + 1, kv_heads, rows)](
        q, pages.k, pages.tables, pages.lengths, words, dense_upto, estimates, sums, q.stride(0), q.stride(1),
        *pages.table_strides, words.stride(0), blocks, scale, softcap or 0.0, HEADS=heads, KV_HEADS=kv_heads,
        D=head_dim, PAGE=pages.k.shape[2], HALF=half, BITS=choice.source.bits, SIZE=choice.size, FIRST=choice.first,
        LAST=choice.last, TILE=TILE, MEMBERS=members, PARTS=max(PARTS, 16 // members), CAPPED=softcap is not None,
        OPERAND=tl.bfloat16 if q.is_cuda else tl.float32, num_warps=4 if half <= 64 else 8, **launched(device),
    )  # fmt: skip
    return Estimates(estimates, sums)


@triton.jit
def channel_numbers(own, kv_head, COUNT: tl.constexpr, HALF: tl.constexpr):
    """The channels of a KV head, the even and the odd ones, and which there are."""
    channels = tl.load(own + W.channels).to(tl.pointer_type(tl.int64)) + kv_head * COUNT
    plane = tl.arange(0, HALF)
    even, odd = plane * 2 < COUNT, plane * 2 + 1 < COUNT
    one, two = tl.load(channels + plane * 2, mask=even, other=0), tl.load(channels + plane * 2 + 1, mask=odd, other=0)
    return one, two, even, odd


@triton.jit
def _framing(frame, first, there, kv_head, KV_HEADS: tl.constexpr, COUNT: tl.constexpr):
    """Mean and deviation, from the address of fp32 [2, kv_heads, r], of the labels' places ``first``; 0 and 1 where
    there is no frame."""
    known = also(there, frame != 0)
    at = frame.to(tl.pointer_type(tl.float32)) + kv_head * COUNT + first
    mean = tl.load(at, mask=known, other=0.0)
    return mean, tl.load(at + KV_HEADS * COUNT, mask=known, other=1.0)


@triton.jit
def _rounded(value):
    """To the nearest whole number, ties to the even one, from 0 to 255."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _put_label(
    k_pool, table, own, at, kv_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr,
    BITS: tl.constexpr, FRAMED: tl.constexpr,
):  # fmt: skip
    """Label the key at position ``at``; ``table`` and ``own``: the row's KV head's slots, and its words."""
    first, second, even, odd = channel_numbers(own, kv_head, COUNT, HALF)
    room = tl.load(own + W.room)
    row = pool_rows(table, at, None, kv_head, KV_HEADS, PAGE)
    one = load_keys(k_pool, row, first, even, D).to(tl.float32)
    two = load_keys(k_pool, row, second, odd, D).to(tl.float32)
    plane = tl.arange(0, HALF)
    if FRAMED:
        frame = tl.load(own + W.frame)
        mean, deviation = _framing(frame, plane * 2, even, kv_head, KV_HEADS, COUNT)
        one = tl.div_rn(one - mean, deviation)
        mean, deviation = _framing(frame, plane * 2 + 1, odd, kv_head, KV_HEADS, COUNT)
        two = tl.div_rn(two - mean, deviation)
    if BITS == 16:
        whole = tl.load(own + W.codes).to(tl.pointer_type(tl.float32)) + (kv_head * room + at) * COUNT
        tl.store(whole + plane * 2, one, mask=even)
        tl.store(whole + plane * 2 + 1, two, mask=odd)
    else:
        low = tl.minimum(tl.min(tl.where(even, one, float("inf")), 0), tl.min(tl.where(odd, two, float("inf")), 0))
        high = tl.maximum(tl.max(tl.where(even, one, float("-inf")), 0), tl.max(tl.where(odd, two, float("-inf")), 0))
        STEPS: tl.constexpr = 2**BITS - 1
        step = tl.div_rn(high - low, tl.full([], STEPS, tl.float32))
        least = tl.maximum(step, 1.1754943508222875e-38)
        one = _rounded(tl.div_rn(one - low, tl.zeros([HALF], tl.float32) + least)).to(tl.int32)
        two = _rounded(tl.div_rn(two - low, tl.zeros([HALF], tl.float32) + least)).to(tl.int32)
        tile = kv_head * room + at // 16
        codes = tl.load(own + W.codes).to(tl.pointer_type(tl.uint8))
        if BITS <= 4:
            PLANES: tl.constexpr = (COUNT + 1) // 2
            packed = one | (tl.where(odd, two, 0) << 4)
            tl.store(codes + (tile * PLANES + plane) * 16 + at % 16, packed.to(tl.uint8), mask=even)
        else:
            tl.store(codes + (tile * COUNT + plane * 2) * 16 + at % 16, one.to(tl.uint8), mask=even)
            tl.store(codes + (tile * COUNT + plane * 2 + 1) * 16 + at % 16, two.to(tl.uint8), mask=odd)
        extent = tl.load(own + W.ranges).to(tl.pointer_type(tl.float32)) + tile * 32 + at % 16
        tl.store(extent, low)
        tl.store(extent + 16, step)


@triton.jit
def codes_at(own, kv_head, key, there, COUNT: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr):
    """Of the labels of ``key`` [n] in at most 8 bits: the codes of the even and of the odd channels, int32 [HALF, n]
    each, the least value and the step, float32 [n]. Codes and ranges lie in lines of 16 bytes (Labels.words sees to
    it), so that they are copied by lines and not by bytes."""
    plane = tl.arange(0, HALF)
    even = (plane * 2 < COUNT)[:, None] & there[None, :]
    tile = kv_head * tl.load(own + W.room) + key // 16
    codes = tl.multiple_of(tl.load(own + W.codes).to(tl.pointer_type(tl.uint8)), 16) + (key % 16)[None, :]
    if BITS <= 4:
        PLANES: tl.constexpr = (COUNT + 1) // 2
        both = tl.load(codes + (tile[None, :] * PLANES + plane[:, None]) * 16, mask=even, other=0).to(tl.int32)
        a, b = both & 15, both >> 4
    else:
        at = codes + (tile[None, :] * COUNT + plane[:, None] * 2) * 16
        a = tl.load(at, mask=even, other=0).to(tl.int32)
        b = tl.load(at + 16, mask=(plane * 2 + 1 < COUNT)[:, None] & there[None, :], other=0).to(tl.int32)
    extent = tl.multiple_of(tl.load(own + W.ranges).to(tl.pointer_type(tl.float32)), 16) + tile * 32 + key % 16
    return a, b, tl.load(extent, mask=there, other=0.0), tl.load(extent + 16, mask=there, other=0.0)


@triton.jit(
    do_not_specialize=["table_row", "table_head", "word_row"],
    do_not_specialize_on_alignment=["tables", "lengths", "words"],
)
def _label(
    k_pool, tables, lengths, words, table_row, table_head, word_row,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr,
    BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    kv_head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > 0:
        table = tables + row.to(tl.int64) * table_row + kv_head.to(tl.int64) * table_head
        own = words + row.to(tl.int64) * word_row
        _put_label(k_pool, table, own, length - 1, kv_head, KV_HEADS, D, PAGE, COUNT, HALF, BITS, False)


@triton.jit
def _parts(x, part, OPERAND: tl.constexpr):
    """Rows of ``x`` [rows, n] as those of their operands: the first by rows' ``part``, what that leaves, what both
    leave, and nothing."""
    high = x.to(OPERAND).to(tl.float32)
    middle = (x - high).to(OPERAND).to(tl.float32)
    low = x - high - middle
    own = tl.where((part == 0)[:, None], high, tl.where((part == 1)[:, None], middle, low))
    return tl.where((part < 3)[:, None], own, 0.0).to(OPERAND)


@triton.jit
def _operand(code, BITS: tl.constexpr, OPERAND: tl.constexpr):
    """Codes as a product takes them, of up to 4 bits with 16 added in bfloat16: those are the upper bits of a fraction
    below a fixed exponent, and put there in half the time that a conversion takes."""
    if tl.bfloat16 == OPERAND and BITS <= 4:
        return ((code << 3) | 0x4180).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return code.to(tl.float32).to(OPERAND)


@triton.jit
def _framed_query(
    q, own, real, place, there, channel, kv_head, KV_HEADS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Of queries at the pointers ``q`` [n]: what their ``channel`` says to labels in a frame, float32 [n, HALF], and
    what it says to the frame's means [n]."""
    x = tl.load(q[:, None] + channel[None, :], mask=real[:, None] & there[None, :], other=0.0).to(tl.float32)
    mean, deviation = _framing(tl.load(own + W.frame), place, there, kv_head, KV_HEADS, D)
    return x * deviation[None, :], tl.sum(x * mean[None, :], 1)


@triton.jit(
    do_not_specialize=["table_row", "table_head", "word_row", "blocks"],
    do_not_specialize_on_alignment=["tables", "lengths", "words", "denses", "estimates", "sums"],
)
def _estimate(
    q_ptr, k_pool, tables, lengths, words, denses, estimates, sums, q_row, q_head, table_row, table_head, word_row,
    blocks, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr,
    MEMBERS: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr, OPERAND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The last program along axis 0 labels the new key, which lies in no block that is ranked; the others take turns
    with tiles of keys. A query is the sum of three numbers of OPERAND, a row of the product each, so that products are
    float32's: codes have at most 8 bits."""
    begin(EARLY)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, row, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(0) - 1
    length = tl.load(lengths + row)
    own = words + row.to(tl.int64) * word_row
    if tl.program_id(0) == splits:
        if length > 0:
            table = tables + row.to(tl.int64) * table_row + kv_head.to(tl.int64) * table_head
            _put_label(k_pool, table, own, length - 1, kv_head, KV_HEADS, D, PAGE, D, HALF, BITS, True)
    elif length > tl.load(denses + row):
        stop = length // SIZE - LAST
        first, second, even, odd = channel_numbers(own, kv_head, D, HALF)
        plane = tl.arange(0, HALF)
        queries = q_ptr + row.to(tl.int64) * q_row + kv_head * GROUP * q_head
        member = tl.arange(0, MEMBERS)
        real, at = member < GROUP, queries + member * q_head
        one, means = _framed_query(at, own, real, plane * 2, even, first, kv_head, KV_HEADS, D)
        two, others = _framed_query(at, own, real, plane * 2 + 1, odd, second, kv_head, KV_HEADS, D)
        total, means = tl.sum(one + two, 1), means + others
        line = tl.arange(0, PARTS * MEMBERS)
        part, at = line // MEMBERS, queries + line % MEMBERS * q_head
        one, _means = _framed_query(at, own, line % MEMBERS < GROUP, plane * 2, even, first, kv_head, KV_HEADS, D)
        two, _means = _framed_query(at, own, line % MEMBERS < GROUP, plane * 2 + 1, odd, second, kv_head, KV_HEADS, D)
        one, two = _parts(one, part, OPERAND), _parts(two, part, OPERAND)
        head = (row * HEADS + kv_head * GROUP + member).to(tl.int64)
        out = estimates + head[:, None] * blocks
        most, weight = tl.full([MEMBERS], float("-inf"), tl.float32), tl.zeros([MEMBERS], tl.float32)
        for turn in tl.range(FIRST * SIZE // TILE + tl.program_id(0), tl.cdiv(stop * SIZE, TILE), splits):
            key = turn * TILE + tl.arange(0, TILE)
            a, b, low, step = codes_at(own, kv_head, key, key < stop * SIZE, D, HALF, BITS)
            found = tl.dot(one, _operand(a, BITS, OPERAND), input_precision="tf32x3")
            found = tl.dot(two, _operand(b, BITS, OPERAND), found, input_precision="tf32x3")
            found = tl.sum(tl.reshape(found, [PARTS, MEMBERS, TILE]), 0)
            if tl.bfloat16 == OPERAND and BITS <= 4:
                found -= 16.0 * total[:, None]
            logits = (found * step[None, :] + total[:, None] * low[None, :] + means[:, None]) * scale
            if CAPPED:
                logits = softcap * (1.0 - 2.0 / (tl.exp(logits * (2.0 / softcap)) + 1.0))
            logits = tl.reshape(logits, [MEMBERS, TILE // SIZE, SIZE])
            top = tl.max(logits, 2)
            guess = top + tl.log(tl.sum(tl.exp(logits - top[:, :, None]), 2))
            block = turn * (TILE // SIZE) + tl.arange(0, TILE // SIZE)
            wanted = (block >= FIRST) & (block < stop)
            tl.store(out + block[None, :], guess, mask=real[:, None] & wanted[None, :])
            most, weight = add_guesses(most, weight, tl.where(wanted[None, :], guess, float("-inf")))
        put_sums(sums, splits, tl.program_id(0), head, real, most, weight)
