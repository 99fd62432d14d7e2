"""Labels in recorded steps: all labels of a row are scored (see store.py; ops/triton/batched_labels.py makes them)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.row_words import KeyWords
from saccade.ops.triton.batched_labels import channel_numbers, codes_at
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import begin, launched, pad, processors
from saccade.ops.triton.state_words import places

W = places(KeyWords)
KEYS = 64  # scored in one go


def score_labels(rows: LayerRows, units: int, channels: int, bits: int, active: Tensor | None = None) -> Tensor:
    """``Labels.scores`` of every row: float32 [rows, units, n]; of units that are ``active`` (int8 [rows * units]), all
    by default."""
    q = rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()
    width, device = rows.pages.longest, q.device
    scores = torch.empty(rows.count, units, width, dtype=torch.float32, device=device)
    splits = max(1, min(triton.cdiv(width, KEYS), triton.cdiv(16 * processors(device), units * rows.count)))
    _score_labels[(splits, units, rows.count)](
        q, rows.pages.lengths, rows.words, rows.pages.lengths if active is None else active, scores, q.stride(0),
        q.stride(1), rows.words.stride(0), width, HEADS=rows.heads, KV_HEADS=rows.kv_heads, UNITS=units, COUNT=channels,
        HALF=pad((channels + 1) // 2, 1), BITS=bits, KEYS=KEYS, CHOSEN=active is not None, num_warps=4,
        **launched(device),
    )  # fmt: skip
    return scores


@triton.jit(
    do_not_specialize=["word_row", "width"], do_not_specialize_on_alignment=["lengths", "words", "active", "scores"]
)
def _score_labels(
    q_ptr, lengths, words, active, scores, q_row, q_head, word_row, width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr,
    BITS: tl.constexpr, KEYS: tl.constexpr, CHOSEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    unit, row = tl.program_id(1), tl.program_id(2)
    PER: tl.constexpr = HEADS // UNITS
    count = tl.load(lengths + row)
    if CHOSEN:
        count = tl.where(tl.load(active + row * UNITS + unit) != 0, count, 0)
    if count > 0:
        own = words + row.to(tl.int64) * word_row
        kv_head = unit * PER // (HEADS // KV_HEADS)
        first, second, even, odd = channel_numbers(own, kv_head, COUNT, HALF)
        one, two = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
        for number in tl.static_range(PER):
            q = q_ptr + row.to(tl.int64) * q_row + (unit * PER + number) * q_head
            one += tl.load(q + first, mask=even, other=0.0).to(tl.float32)
            two += tl.load(q + second, mask=odd, other=0.0).to(tl.float32)
        one, two = one / PER, two / PER
        total = tl.sum(one + two, 0)
        plane = tl.arange(0, HALF)
        out = scores + (row * UNITS + unit).to(tl.int64) * width
        for part in tl.range(tl.program_id(0), tl.cdiv(count, KEYS), tl.num_programs(0)):
            key = part * KEYS + tl.arange(0, KEYS)
            there = key < count
            if BITS == 16:
                room = tl.load(own + W.room)
                whole = tl.load(own + W.codes).to(tl.pointer_type(tl.float32)) + (kv_head * room + key)[None, :] * COUNT
                a = tl.load(whole + plane[:, None] * 2, mask=even[:, None] & there[None, :], other=0.0)
                b = tl.load(whole + plane[:, None] * 2 + 1, mask=odd[:, None] & there[None, :], other=0.0)
                found = tl.sum(a * one[:, None] + b * two[:, None], 0)
            else:
                a, b, low, step = codes_at(own, kv_head, key, there, COUNT, HALF, BITS)
                a, b = a.to(tl.float32), b.to(tl.float32)
                found = tl.sum(a * one[:, None] + b * two[:, None], 0) * step + total * low
            tl.store(out + key, found, mask=there)
