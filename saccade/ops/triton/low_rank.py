"""LOCKS's page records (kv/low_rank.py) of many rows: made where a row fills a page, and scored against its query.

A record's bytes lie as kv/low_rank.py has them, in [pages, record rows, kv_heads, head_dim]. Singular vectors come from
the eigenvectors of the page's small Gram matrix by Jacobi's rotations, as many pairs at once as there are: their signs
and the order of equal ones may be other than torch's, the product of coefficients and basis is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.low_rank import RANK, TINY, record_bytes, record_rows
from saccade.ops.layout import rows as laid
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.common import also, begin, launched, pad, pool_rows, precision
from saccade.ops.triton.readers import load_keys
from saccade.selection.readings import Choice

SWEEPS = 6  # over all pairs of a page's keys: off the diagonal float32's rounding is left
TILE = 16  # pages that a program scores
_RANK: tl.constexpr = tl.constexpr(RANK)
_TINY: tl.constexpr = tl.constexpr(TINY)


def record_pages(pages: Pages, pointers: Tensor, size: int, limits: Tensor | None = None) -> None:
    """Write the record of each page of ``size`` keys that a row's last key fills, all keys being stored; ``pointers``
    and ``limits`` as in batched_decode.append_rows."""
    kv_heads, head_dim = pages.k.shape[1], pages.k.shape[-1]
    lengths = pages.lengths if limits is None else limits
    rows = record_rows(size, head_dim)
    _record[(kv_heads, len(lengths))](
        pages.k, pages.tables, lengths, pointers, *pages.table_strides, KV_HEADS=kv_heads,
        ROWS=len(lengths) // len(pages.lengths), D=head_dim, D_PAD=pad(head_dim), PAGE=pages.k.shape[2], SIZE=size,
        KEYS=pad(size), RECORD=rows, BYTES=record_bytes(size, head_dim), SWEEPS=SWEEPS, num_warps=1,
        **launched(pages.k.device),
    )  # fmt: skip


def score_records(
    q: Tensor, pages: Pages, pointers: Tensor, choice: Choice, scale: float, softcap: float | None
) -> Tensor:
    """``q`` [rows, heads, head_dim] -> float32 [rows, kv_heads, n]: what each page weighs to the heads of a KV head, as
    methods/locks.py has it with ``combine="mass"``; -inf where a page is not to be chosen. ``n``: as many pages as
    ``pages.longest`` keys make."""
    q = laid(q)
    batch, heads, head_dim = q.shape
    kv_heads, blocks, device = pages.k.shape[1], -(-pages.longest // choice.size), q.device
    tiles = triton.cdiv(blocks, TILE)
    weights = torch.empty(batch, heads, blocks, dtype=torch.float32, device=device)
    most = torch.empty(batch, heads, tiles, dtype=torch.float32, device=device)
    scores = torch.empty(batch, kv_heads, blocks, dtype=torch.float32, device=device)
    shape = {
        "HEADS": heads, "KV_HEADS": kv_heads, "G_PAD": pad(heads // kv_heads), "SIZE": choice.size,
        "FIRST": choice.first, "LAST": choice.last, "TILE": TILE, **launched(device),
    }  # fmt: skip
    grid = (tiles, kv_heads, batch)
    _weigh[grid](
        q, pages.lengths, pointers, weights, most, q.stride(0), q.stride(1), blocks, scale, softcap or 0.0, D=head_dim,
        HALF=pad(head_dim // 2), RECORD=record_rows(choice.size, head_dim), CAPPED=softcap is not None,
        PRECISION=precision(q.dtype), num_warps=4, **shape,
    )  # fmt: skip
    _combine[grid](weights, most, pages.lengths, scores, blocks, PARTS=pad(tiles), num_warps=4, **shape)
    return scores


@triton.jit
def _near(values):
    """The nearest integers, halves to even ones, of what is below 2^22."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def _scale(greatest, most: tl.constexpr):
    return tl.minimum(tl.maximum(greatest / most, _TINY), 60000.0).to(tl.float16)


@triton.jit
def _put(base, at, values, there, head, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """Bytes ``values`` at places ``at`` of one head's record, which begins at ``base``."""
    tl.store(base + (at // D) * KV_HEADS * D + head * D + at % D, values.to(tl.uint8), mask=there)


@triton.jit
def _put_scales(base, at, scales, there, head, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """float16 ``scales`` at bytes ``at`` and the next."""
    bits = scales.to(tl.int16, bitcast=True).to(tl.int32)
    _put(base, at, bits & 255, there, head, KV_HEADS, D)
    _put(base, at + 1, (bits >> 8) & 255, there, head, KV_HEADS, D)


@triton.jit
def _rotated(gram, vectors, N: tl.constexpr, turn):
    """One round of a tournament: every key meets one other, and the two of each pair are made orthogonal."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    me = tl.arange(0, N)
    alone = (turn * (N // 2)) % (N - 1)  # who meets the last one, which has no place in the circle
    other = tl.where(me == N - 1, alone, tl.where(me == alone, N - 1, (turn - me + N - 1) % (N - 1)))
    meets = column == other[:, None]
    own = tl.sum(tl.where(row == column, gram, 0.0), 0)
    theirs = tl.sum(tl.where(meets, own[None, :], 0.0), 1)
    mixed = tl.sum(tl.where(meets, gram, 0.0), 1)
    apart = tl.abs(mixed) > 1e-30
    tau = (theirs - own) / tl.where(apart, 2.0 * mixed, 1.0)
    tau = tl.minimum(tl.maximum(tau, -1e15), 1e15)
    # Of a pair with equal lengths both would turn alike: the lower one says which way.
    sign = tl.where(tau > 0, 1.0, tl.where(tau < 0, -1.0, tl.where(me < other, 1.0, -1.0)))
    tangent = tl.where(apart, sign / (tl.abs(tau) + tl.sqrt(tau * tau + 1.0)), 0.0)
    cosine = 1.0 / tl.sqrt(tangent * tangent + 1.0)
    turned = tl.where(row == column, cosine[:, None], tl.where(meets, (tangent * cosine)[:, None], 0.0))
    gram = tl.dot(tl.trans(turned), tl.dot(gram, turned, input_precision="ieee"), input_precision="ieee")
    return gram, tl.dot(vectors, turned, input_precision="ieee")


@triton.jit(do_not_specialize=["table_stride", "table_head"])
def _record(
    k_pool, tables, lengths, pointers, table_stride, table_head,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, RECORD: tl.constexpr, BYTES: tl.constexpr, SWEEPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if (length > 0) & (length % SIZE == 0):
        table = tables + (row // ROWS).to(tl.int64) * table_stride + head.to(tl.int64) * table_head
        key, channel, number = tl.arange(0, KEYS), tl.arange(0, D_PAD), tl.arange(0, 16)
        real = channel < D
        there = (key < SIZE)[:, None] & real[None, :]
        place = pool_rows(table, length - SIZE + key, key < SIZE, head, KV_HEADS, PAGE)[:, None]
        keys = load_keys(k_pool, place, channel[None, :], there, D).to(tl.float32)
        keys = tl.where(tl.abs(keys) <= 3.4028234e38, keys, 0.0)  # what is no number is not, either
        mean = tl.sum(keys, 0) / SIZE
        keys = tl.where(there, keys - mean[None, :], 0.0)
        greatest = tl.maximum(tl.max(tl.max(tl.abs(keys), 1), 0), 1e-30)
        keys = keys / greatest
        gram = tl.dot(keys, tl.trans(keys), input_precision="ieee")
        same = key[:, None] == key[None, :]
        vectors = same.to(tl.float32)
        for turn in range(SWEEPS * (KEYS - 1)):
            gram, vectors = _rotated(gram, vectors, KEYS, turn % (KEYS - 1))
        squares = tl.maximum(tl.sum(tl.where(same, gram, 0.0), 0), 0.0)
        # The greatest are the last ones, rising.
        before = (squares[:, None] > squares[None, :]) | (
            (squares[:, None] == squares[None, :]) & (key[:, None] < key[None, :])
        )
        rank = tl.sum(before.to(tl.int32), 0)
        picked = (rank[:, None] + number[None, :] == _RANK - 1).to(tl.float32)  # [KEYS, 16]
        left = tl.dot(vectors, picked, input_precision="ieee")
        singular = tl.sqrt(tl.sum(picked * squares[:, None], 0))
        basis = tl.dot(tl.trans(left), keys, input_precision="ieee") / tl.maximum(singular, 1e-10)[:, None]
        enough = singular > 1e-6 * tl.maximum(tl.max(singular, 0), 1e-20)
        basis = tl.where((enough & (number < _RANK))[:, None] & real[None, :], basis, 0.0)
        coefficients = left * singular[None, :] * greatest  # [KEYS, 16]

        base = tl.load(pointers + row // ROWS).to(tl.pointer_type(tl.uint8))
        base += (length // SIZE - 1).to(tl.int64) * RECORD * KV_HEADS * D
        by_direction = _scale(tl.max(tl.abs(basis), 1), 7.0)
        four = _near(basis / by_direction.to(tl.float32)[:, None])
        four = tl.minimum(tl.maximum(four, -7.0), 7.0).to(tl.int32) & 15
        low, high = tl.split(tl.reshape(four, (16, D_PAD // 2, 2)))
        byte = tl.arange(0, D_PAD // 2)
        wanted = (number < _RANK)[:, None] & (byte < D // 2)[None, :]
        _put(base, number[:, None] * (D // 2) + byte[None, :], low | (high << 4), wanted, head, KV_HEADS, D)
        by_key = _scale(tl.max(tl.abs(coefficients), 1), 127.0)
        eight = _near(coefficients / by_key.to(tl.float32)[:, None])
        eight = tl.minimum(tl.maximum(eight, -127.0), 127.0).to(tl.int32) & 255
        wanted = (key < SIZE)[:, None] & (number < _RANK)[None, :]
        begins: tl.constexpr = _RANK * D // 2
        _put(base, begins + key[:, None] * _RANK + number[None, :], eight, wanted, head, KV_HEADS, D)
        of_mean = _scale(tl.max(tl.abs(mean), 0), 127.0)
        middle = _near(mean / of_mean.to(tl.float32))
        middle = tl.minimum(tl.maximum(middle, -127.0), 127.0).to(tl.int32) & 255
        _put(base, begins + SIZE * _RANK + channel, middle, real, head, KV_HEADS, D)
        scales: tl.constexpr = begins + SIZE * _RANK + D
        _put_scales(base, scales + 2 * number, by_direction, number < _RANK, head, KV_HEADS, D)
        _put_scales(base, scales + 2 * (_RANK + key), by_key, key < SIZE, head, KV_HEADS, D)
        once = number == 0
        _put_scales(
            base, scales + 2 * (_RANK + SIZE) + number, tl.where(once, of_mean, of_mean), once, head, KV_HEADS, D
        )
        rest = BYTES + tl.arange(0, D_PAD)
        _put(base, rest, tl.zeros([D_PAD], tl.int32), rest < RECORD * D, head, KV_HEADS, D)


@triton.jit
def _reached(at, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """Where byte ``at`` of a head's record lies, counted from its first."""
    return (at // D) * KV_HEADS * D + at % D


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["lengths", "pointers"])
def _weigh(
    q_ptr, lengths, pointers, weights, most, q_row, q_head, blocks, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, G_PAD: tl.constexpr,
    SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr, RECORD: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Log of the sum of e^logit over each page's keys, of every head, and the greatest of a tile."""
    begin(EARLY)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    stop = tl.cdiv(length, SIZE) - LAST
    member = tl.arange(0, G_PAD)
    head = row.to(tl.int64) * HEADS + kv_head * GROUP + member
    here = member < GROUP
    weight = tl.full([TILE, G_PAD], float("-inf"), tl.float32)
    block = tile * TILE + tl.arange(0, TILE)
    wanted = (block >= FIRST) & (block < stop) & (block < blocks)
    if (tile * TILE < stop) & (length > 0):
        base = tl.load(pointers + row).to(tl.pointer_type(tl.uint8))
        page = base + block.to(tl.int64) * RECORD * KV_HEADS * D + kv_head * D
        half, key = tl.arange(0, HALF), tl.arange(0, SIZE)
        real = half < D // 2
        own = q_ptr + row.to(tl.int64) * q_row + (kv_head * GROUP + member)[None, :] * q_head + 2 * half[:, None]
        even = tl.load(own, mask=here[None, :] & real[:, None], other=0.0)  # [HALF, G_PAD]
        odd = tl.load(own + 1, mask=here[None, :] & real[:, None], other=0.0)
        there = wanted[:, None] & real[None, :]
        codes: tl.constexpr = _RANK * D // 2
        middles: tl.constexpr = codes + SIZE * _RANK
        scales: tl.constexpr = middles + D
        logits = tl.zeros([TILE, SIZE, G_PAD], tl.float32)
        for direction in tl.static_range(_RANK):
            at = _reached(direction * (D // 2) + half, KV_HEADS, D)
            pairs = tl.load(page[:, None] + at[None, :], mask=there, other=0).to(tl.int32)
            low = (((pairs & 15) ^ 8) - 8).to(even.dtype)
            high = ((pairs >> 4) ^ 8) - 8
            along = tl.dot(low, even, input_precision=PRECISION)
            along = tl.dot(high.to(odd.dtype), odd, along, input_precision=PRECISION)
            place = _reached(scales + 2 * direction, KV_HEADS, D)
            step = tl.load((page + place).to(tl.pointer_type(tl.float16)), mask=wanted, other=0.0).to(tl.float32)
            at = _reached(codes + key * _RANK + direction, KV_HEADS, D)
            code = tl.load(page[:, None] + at[None, :], mask=wanted[:, None], other=0).to(tl.int8, bitcast=True)
            logits += code.to(tl.float32)[:, :, None] * (along * step[:, None])[:, None, :]
        at = _reached(scales + 2 * (_RANK + key), KV_HEADS, D)
        steps = tl.load((page[:, None] + at[None, :]).to(tl.pointer_type(tl.float16)), mask=wanted[:, None], other=0.0)
        at = _reached(middles + 2 * half, KV_HEADS, D)
        low = tl.load(page[:, None] + at[None, :], mask=there, other=0).to(tl.int8, bitcast=True)
        at = _reached(middles + 2 * half + 1, KV_HEADS, D)
        high = tl.load(page[:, None] + at[None, :], mask=there, other=0).to(tl.int8, bitcast=True)
        middle = tl.dot(low.to(even.dtype), even, input_precision=PRECISION)
        middle = tl.dot(high.to(odd.dtype), odd, middle, input_precision=PRECISION)
        place = _reached(scales + 2 * (_RANK + SIZE), KV_HEADS, D)
        step = tl.load((page + place).to(tl.pointer_type(tl.float16)), mask=wanted, other=0.0).to(tl.float32)
        logits = logits * steps.to(tl.float32)[:, :, None] + (middle * step[:, None])[:, None, :]
        logits = logits * scale
        if CAPPED:
            logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))
        top = tl.max(logits, 1)
        weight = top + tl.log(tl.sum(tl.exp(logits - top[:, None, :]), 1))
        weight = tl.where(wanted[:, None], weight, float("-inf"))
        tl.store(weights + head[None, :] * blocks + block[:, None], weight, mask=wanted[:, None] & here[None, :])
    tl.store(most + head * tl.num_programs(0) + tile, tl.max(weight, 0), mask=here)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["lengths"])
def _combine(
    weights, most, lengths, scores, blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, G_PAD: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The heads' weights of a page added up, each over the head's heaviest page."""
    begin(EARLY)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    stop = tl.cdiv(length, SIZE) - LAST
    member, part = tl.arange(0, G_PAD), tl.arange(0, PARTS)
    head = row.to(tl.int64) * HEADS + kv_head * GROUP + member
    here = member < GROUP
    block = tile * TILE + tl.arange(0, TILE)
    wanted = also((block >= FIRST) & (block < stop) & (block < blocks), length > 0)
    tops = tl.load(
        most + head[:, None] * tl.num_programs(0) + part[None, :],
        mask=here[:, None] & (part < tl.num_programs(0))[None, :],
        other=float("-inf"),
    )
    top = tl.max(tops, 1)
    top = tl.where(top > float("-inf"), top, 0.0)  # of a row none of whose pages are ranked
    weight = tl.load(
        weights + head[None, :] * blocks + block[:, None],
        mask=wanted[:, None] & here[None, :],
        other=float("-inf"),
    )
    shares = tl.where(here[None, :] & wanted[:, None], tl.exp(weight - top[None, :]), 0.0)
    out = scores + (row * KV_HEADS + kv_head).to(tl.int64) * blocks + block
    tl.store(out, tl.where(wanted, tl.sum(shares, 1), float("-inf")), mask=block < blocks)
