"""What blocks of many rows are guessed to weigh, from the mean and the variance of their keys
(methods/psa/estimates.py)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_decode import Summaries
from saccade.ops.triton.batched_guesses import Estimates, add_guesses, put_sums
from saccade.ops.triton.common import begin, launched, pad
from saccade.selection.readings import Choice

TILE = 32


def estimate_moments(
    q: Tensor, pages: Pages, summaries: Summaries, choice: Choice, scale: float, softcap: float | None
) -> Estimates:
    """Guesses for ``q`` [rows, heads, head_dim] of what each block that ``choice`` ranks weighs; as many have a place
    as for batched_decode.score_blocks. What is said of other blocks means nothing."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    rows, heads, head_dim = q.shape
    kv_heads, blocks, device = pages.k.shape[1], -(-pages.longest // choice.size), q.device
    estimates = torch.empty(rows, heads, blocks, dtype=torch.float32, device=device)
    parts = triton.cdiv(blocks, TILE)
    sums = torch.empty(rows, heads, parts, 2, dtype=torch.float32, device=device)
    _estimate[(parts, kv_heads, rows)](
        q, pages.lengths, summaries.pointers, estimates, sums, q.stride(0), q.stride(1), blocks, scale, softcap or 0.0,
        HEADS=heads, KV_HEADS=kv_heads, D=head_dim, D_PAD=pad(head_dim), G_PAD=pad(heads // kv_heads),
        SIZE=choice.size, FIRST=choice.first, LAST=choice.last, LOG=math.log(choice.size), TILE=TILE,
        CAPPED=softcap is not None, num_warps=4, **launched(device),
    )  # fmt: skip
    return Estimates(estimates, sums)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["lengths", "pointers", "estimates", "sums"])
def _estimate(
    q_ptr, lengths, pointers, estimates, sums, q_row, q_head, blocks, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G_PAD: tl.constexpr,
    SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, LOG: tl.constexpr, TILE: tl.constexpr,
    CAPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, row = tl.program_id(1), tl.program_id(2)
    stop = tl.load(lengths + row) // SIZE - LAST
    member = tl.arange(0, G_PAD)
    head = kv_head * GROUP + member
    most, weight = tl.full([G_PAD], float("-inf"), tl.float32), tl.zeros([G_PAD], tl.float32)
    if tl.program_id(0) * TILE < stop:
        block = tl.program_id(0) * TILE + tl.arange(0, TILE)
        wanted = (block >= FIRST) & (block < stop)
        channel = tl.arange(0, D_PAD)
        base = tl.load(pointers + row).to(tl.pointer_type(q_ptr.dtype.element_ty))
        at = base + (block[:, None].to(tl.int64) * 2 * KV_HEADS + kv_head) * D + channel[None, :]
        there = wanted[:, None] & (channel < D)[None, :]
        mean = tl.load(at, mask=there, other=0.0).to(tl.float32)
        variance = tl.load(at + KV_HEADS * D, mask=there, other=0.0).to(tl.float32)
        q = (
            tl.load(
                q_ptr + row.to(tl.int64) * q_row + head[:, None] * q_head + channel[None, :],
                mask=(member < GROUP)[:, None] & (channel < D)[None, :],
                other=0.0,
            ).to(tl.float32)
            * scale
        )
        mu = tl.dot(mean, tl.trans(q), input_precision="tf32x3")
        square = tl.dot(variance, tl.trans(q * q), input_precision="tf32x3")
        if CAPPED:
            bent = 1.0 - 2.0 / (tl.exp(2.0 * mu / softcap) + 1.0)
            mu = softcap * bent
            square = square * (1.0 - bent * bent) * (1.0 - bent * bent)
        square = tl.maximum(square, 0.0)
        guess = mu + tl.where(square < 2.0 * LOG, LOG + square / 2.0, tl.sqrt(2.0 * LOG * square))
        out = estimates + (row.to(tl.int64) * HEADS + head)[None, :] * blocks + block[:, None]
        tl.store(out, guess, mask=wanted[:, None] & (member < GROUP)[None, :])
        most, weight = add_guesses(most, weight, tl.trans(tl.where(wanted[:, None], guess, float("-inf"))))
    put_sums(
        sums, tl.num_programs(0), tl.program_id(0), row.to(tl.int64) * HEADS + head, member < GROUP, most, weight
    )  # fmt: skip
