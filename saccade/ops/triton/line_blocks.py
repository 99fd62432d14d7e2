"""Lines so many that whole blocks of keys cost less: for tiles of rows whose distances, however scattered, reach most
of the keys, blocks of 128 keys are read as dense attention reads them, and a mask leaves out what is on no line.

Columns that are few in their block are gathered instead, unless a slash has the block read anyway.

Which keys of a block a row sees is four words of 32 bits: what the row's distance from the block says of slashes, the
same words at every place with that distance, or'ed with those of the block's columns. A tile goes this way where its
blocks cost less than the spans and gathered columns that ``lines.py`` would read; the device decides, and no count goes
to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.choose import lists_of
from saccade.ops.triton.common import LN2, LOG2E, cap_logits, is_hopper, pad
from saccade.ops.triton.pages import tiles_of
from saccade.selection import Shape

SIZE = 128  # rows of a tile, and keys of a block
BITS = 64  # of a word of lines.py
STEPS = 1.7  # steps of lines.py, 64 x 64, that take as long as a block: 10 and 17 ns on an H200, the whole GPU busy
WARPS, STAGES = 8, 3
CROWD = 12  # columns of a block from which on it is read for them; with fewer they are gathered
GATHERED = 64  # columns at once


@dataclass(frozen=True)
class Covered:
    """``marks`` int8 [units, row tiles]: 1 for a tile of 128 rows that reads blocks. Their lists: ``offsets`` int64
    [units * row tiles + 1], ``indices`` int32, empty for the others; ``columns`` int64 [units, 2 * blocks], bits of
    columns. Those gathered: ``lone_offsets`` int64 [units + 1], ``lone`` int32; ``upto`` int32 [units, blocks]: how
    many of them lie in a block or before; ``near`` int8 [units, blocks]: whether a block so many behind has slashes.
    """

    marks: Tensor
    offsets: Tensor
    indices: Tensor
    columns: Tensor
    lone_offsets: Tensor
    lone: Tensor
    upto: Tensor
    near: Tensor


def serves(q: Tensor) -> bool:
    """Whether the kernel below was measured to pay for such queries: 16-bit rows of up to 128 channels on a GPU with a
    copy engine."""
    return q.element_size() == 2 and q.shape[-1] <= 128 and is_hopper(q.device)


def cover(shape: Shape, is_distance: Tensor, is_column: Tensor, steps: Tensor) -> Covered:
    """What each tile of 128 rows reads. ``is_distance``, ``is_column``: int8 [units, n], n a multiple of 64 from the
    keys on; ``steps`` int32 [units, n / 64]: steps that ``lines.py`` takes for each tile of 64 rows."""
    units, n = is_distance.shape
    blocks = -(-n // SIZE)
    if n % SIZE:
        is_distance, is_column, steps = (
            torch.nn.functional.pad(part, (0, more))
            for part, more in ((is_distance, BITS), (is_column, BITS), (steps, 1))
        )
    bit = torch.arange(BITS, device=is_column.device)
    columns = (is_column.view(units, -1, BITS).long() << bit).sum(-1)
    within = is_column.view(units, blocks, SIZE)
    held = within.sum(-1, dtype=torch.int32)
    crowded = held >= CROWD
    lone = torch.where(crowded[..., None], 0, within).flatten(1)
    upto = torch.where(crowded, 0, held).cumsum(1, dtype=torch.int32)
    some = is_distance.view(units, blocks, SIZE).any(-1)
    # A block b tiles behind holds distances b * 128 - 127 .. b * 128 + 127.
    later = is_distance.view(units, blocks, SIZE)[..., 1:].any(-1)
    near = some.clone()
    near[:, 1:] |= later[:, :-1]
    first, last = shape.q_start // SIZE, (shape.q_start + shape.q_len - 1) // SIZE
    tile = torch.arange(first, last + 1, device=near.device)[:, None]
    back = tile - torch.arange(blocks, device=near.device)
    wanted = (near[:, back.clamp(min=0)] | crowded[:, None]) & (back >= 0)
    ours = wanted.sum(-1) * STEPS + upto[:, first : last + 1] * (2 / GATHERED)
    marks = ours < steps.view(units, blocks, 2).sum(-1)[:, first : last + 1]
    offsets, indices = lists_of((wanted & marks[..., None]).flatten(0, 1))
    lists = offsets, indices, columns, *lists_of(lone)
    return Covered(marks.to(torch.int8), *lists, upto, near.to(torch.int8))


def attend(
    q: Tensor, shape: Shape, covered: Covered, words: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, softcap: float | None,
) -> None:  # fmt: skip
    """Write the rows of ``covered``'s tiles into ``out`` and ``lse``. ``k``, ``v``: contiguous [kv_heads, keys,
    head_dim]; ``words`` int64 [units, *]: bit c of word x says whether distance x - c is marked."""
    heads, q_len, head_dim = q.shape
    first, tiles = shape.q_start // SIZE, covered.marks.shape[1]
    if scale <= 0:
        q, scale = q * scale, 1.0
    _covered[(heads, tiles)](
        q, tiles_of(k, SIZE), tiles_of(v, SIZE), k, v, covered.marks, covered.offsets, covered.indices, words,
        covered.columns, covered.lone_offsets, covered.lone, covered.upto, covered.near, out, lse, q.stride(0),
        q.stride(1), words.stride(0), covered.columns.stride(0), first, shape.q_start, q_len, scale * LOG2E,
        softcap or 0.0,
        HEADS=heads, KV_HEADS=len(k), UNITS=covered.marks.shape[0], D=head_dim, D_PAD=pad(head_dim), SIZE=SIZE,
        CAPPED=softcap is not None, LN2=LN2, STAGES=STAGES, GATHERED=GATHERED, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _low(count):
    """int32 words with their ``count`` lowest bits set, of up to 32."""
    return tl.where(count >= 32, -1, (1 << tl.minimum(tl.maximum(count, 0), 31)) - 1)


@triton.jit
def _slashes(words, back):
    return tl.load(words + back, mask=back >= 0, other=0), tl.load(words + back - 64, mask=back >= 64, other=0)


@triton.jit
def _covered_step(
    acc, weight, top, q, position, start, limit, k_keys, v_keys, near, far, columns, kv_head, scale_log2, softcap,
    SIZE: tl.constexpr, CAPPED: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """The block of keys from ``start`` on: online softmax over what is on a line. ``near``, ``far``: each row's slashes
    among the block's first keys and last."""
    piece = (kv_head * limit + start).to(tl.int32)
    k = k_keys.load([piece, 0])
    back = position - start  # of each row from the block's first key
    near_columns = tl.load(columns + start // 64)
    far_columns = tl.load(columns + start // 64 + 1)
    w0, w1 = near.to(tl.int32), (near >> 32).to(tl.int32)
    w2, w3 = far.to(tl.int32), (far >> 32).to(tl.int32)
    c0, c1 = near_columns.to(tl.int32), (near_columns >> 32).to(tl.int32)
    c2, c3 = far_columns.to(tl.int32), (far_columns >> 32).to(tl.int32)
    if DIAGONAL:  # slashes are never ahead of their row, columns may be
        w0, w1 = w0 | (c0 & _low(back + 1)), w1 | (c1 & _low(back - 31))
        w2, w3 = w2 | (c2 & _low(back - 63)), w3 | (c3 & _low(back - 95))
    else:
        w0, w1, w2, w3 = w0 | c0, w1 | c1, w2 | c2, w3 | c3
    key = tl.arange(0, SIZE)[None, :]
    low = tl.where(key < 32, w0[:, None], w1[:, None])
    high = tl.where(key < 96, w2[:, None], w3[:, None])
    seen = (tl.where(key < 64, low, high) & (1 << (key & 31))) != 0
    scores = tl.dot(q, tl.trans(k))
    if CAPPED:
        scores, scale_log2 = cap_logits(scores, scale_log2, softcap, True), 1.0
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale_log2)  # the scale is above 0: it may come after the maximum
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - anchor)
    p = tl.exp2(scores * scale_log2 - anchor[:, None])
    weight = weight * shrink + tl.sum(p, 1)
    v = v_keys.load([piece, 0])
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, weight, higher


@triton.jit
def _lone_step(
    acc, weight, top, q, position, key, valid, limit, k_ptr, v_ptr, kv_head, scale_log2, softcap,
    D: tl.constexpr, D_PAD: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Gathered columns: online softmax, as over a block."""
    channel = tl.arange(0, D_PAD)
    at = (kv_head.to(tl.int64) * limit + key)[:, None] * D + channel[None, :]
    there = valid[:, None] & (channel[None, :] < D)
    scores = tl.dot(q, tl.trans(tl.load(k_ptr + at, mask=there, other=0.0)))
    if CAPPED:
        scores, scale_log2 = cap_logits(scores, scale_log2, softcap, True), 1.0
    scores = tl.where(valid[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - anchor)
    p = tl.exp2(scores * scale_log2 - anchor[:, None])
    v = tl.load(v_ptr + at, mask=there, other=0.0)
    return tl.dot(p.to(v.dtype), v, acc * shrink[:, None]), weight * shrink + tl.sum(p, 1), higher


@triton.jit(do_not_specialize=["words_unit", "columns_unit", "first", "q_start", "q_len"])
def _covered(
    q_ptr, k_keys, v_keys, k_ptr, v_ptr, marks, offsets, indices, words, columns, lone_offsets, lone, upto, near_blocks,
    out, lse, q_head, q_row, words_unit, columns_unit, first, q_start, q_len, scale_log2, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    SIZE: tl.constexpr, CAPPED: tl.constexpr, LN2: tl.constexpr, STAGES: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    within = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    unit = head // (HEADS // UNITS)
    listed = tl.load(offsets + unit * tl.num_programs(1) + within)
    count = (tl.load(offsets + unit * tl.num_programs(1) + within + 1) - listed).to(tl.int32)
    if tl.load(marks + unit * tl.num_programs(1) + within) > 0:
        begin = (first + within) * SIZE
        position = begin + tl.arange(0, SIZE)
        row = position - q_start
        inside = (row >= 0) & (row < q_len)
        limit = q_start + q_len
        channel = tl.arange(0, D_PAD)
        q = tl.load(
            q_ptr + head.to(tl.int64) * q_head + row.to(tl.int64)[:, None] * q_row + channel[None, :],
            mask=inside[:, None] & (channel[None, :] < D),
            other=0.0,
        )
        words += unit.to(tl.int64) * words_unit
        columns += unit.to(tl.int64) * columns_unit
        acc = tl.zeros([SIZE, D_PAD], tl.float32)
        weight = tl.zeros([SIZE], tl.float32)
        top = tl.full([SIZE], float("-inf"), tl.float32)
        ids = indices + listed
        last = tl.load(ids + count - 1, mask=count > 0, other=-1)
        plain = count - tl.where(
            last * SIZE >= begin, 1, 0
        )  # lists are sorted: only the last block can be the diagonal
        block = tl.load(ids, mask=count > 0, other=0)
        near, far = _slashes(words, position - block * SIZE)
        for i in tl.range(0, plain, num_stages=STAGES):
            start = block * SIZE
            own, other = near, far
            # The next is read a turn ahead: fetching a tile waits for its place.
            block = tl.load(ids + tl.minimum(i + 1, count - 1))
            near, far = _slashes(words, position - block * SIZE)
            acc, weight, top = _covered_step(
                acc, weight, top, q, position, start, limit, k_keys, v_keys, own, other, columns, kv_head, scale_log2,
                softcap, SIZE, CAPPED, False,
            )  # fmt: skip
        for _ in tl.range(plain, count, num_stages=1):
            acc, weight, top = _covered_step(
                acc, weight, top, q, position, begin, limit, k_keys, v_keys, near, far, columns, kv_head, scale_log2,
                softcap, SIZE, CAPPED, True,
            )  # fmt: skip
        blocks = columns_unit // 2
        lone += tl.load(lone_offsets + unit)
        near_blocks += unit * blocks
        for start in tl.range(0, tl.load(upto + unit * blocks + first + within), GATHERED, num_stages=1):
            number = start + tl.arange(0, GATHERED)
            valid = number < tl.load(upto + unit * blocks + first + within)
            key = tl.load(lone + number, mask=valid, other=0)
            valid = valid & (tl.load(near_blocks + first + within - key // SIZE, mask=valid, other=1) == 0)
            if tl.max(valid.to(tl.int32), 0) > 0:
                acc, weight, top = _lone_step(
                    acc, weight, top, q, position, key, valid & (key < limit), limit, k_ptr, v_ptr, kv_head, scale_log2,
                    softcap, D, D_PAD, CAPPED,
                )  # fmt: skip
        total = tl.where(weight == 0.0, 1.0, weight)
        rows = head.to(tl.int64) * q_len + row
        tl.store(
            out + rows[:, None] * D + channel[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=inside[:, None] & (channel[None, :] < D),
        )
        tl.store(lse + rows, tl.where(weight == 0.0, float("-inf"), top + tl.log2(total)) * LN2, mask=inside)
