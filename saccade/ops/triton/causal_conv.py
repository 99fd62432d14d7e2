"""Causal convolutions by channel whose last rows are kept in slots: a prompt's rows, or a row of each of many
sequences, in one launch that also brings the slots up to date."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.slots import NewRows
from saccade.ops.triton.common import begin, launched, pad

TOKENS = 16  # of a tile of a prompt
CHANNELS = 128  # of a tile


def convolve(given: NewRows, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """``given.rows`` [sequences, channels, tokens] after the rows that their slots [slots, channels, kept] hold,
    convolved with ``weight`` [channels, taps], taps <= kept + 1, and ``bias`` [channels]; with ``silu`` through that.
    Returns the same shape and dtype, a token's channels one after another. Sums are float32, rounded before silu."""
    rows, slots = given.rows, given.slots
    sequences, channels, tokens = rows.shape
    out = torch.empty(sequences, tokens, channels, dtype=rows.dtype, device=rows.device)
    weight = weight.contiguous()
    tile, kept = 1 if tokens == 1 else TOKENS, slots.pool.shape[-1]
    _convolve[(triton.cdiv(tokens, tile), triton.cdiv(channels, CHANNELS), sequences)](
        rows, weight, weight if bias is None else bias, out, slots.pool, slots.reads, slots.writes,
        channels, tokens, *rows.stride(), slots.pool.stride(0), KEPT=kept, KEPT_PAD=pad(kept, 1),
        TAPS=weight.shape[-1], TOKENS=tile, WIDTH=CHANNELS, BIASED=bias is not None, SILU=silu, num_warps=4,
        **launched(rows.device),
    )  # fmt: skip
    return out.transpose(1, 2)


@triton.jit(do_not_specialize=["tokens"])
def _convolve(
    rows, weight, bias, out, pool, reads, writes, channels, tokens, row_sequence, row_channel, row_token, slot_size,
    KEPT: tl.constexpr, KEPT_PAD: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of one sequence. Only programs of the first tile look into the slots, and write them."""
    begin(EARLY)
    tile, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    slot = tl.load(reads + sequence)
    rows += sequence * row_sequence + channel.to(tl.int64) * row_channel
    held = pool + tl.maximum(slot, 0) * slot_size + channel * KEPT
    token = tile * TOKENS + tl.arange(0, TOKENS)
    acc = tl.zeros([TOKENS, WIDTH], tl.float32)
    first = (tile == 0) & (slot >= 0)
    for tap in tl.static_range(TAPS):
        place = token - (TAPS - 1) + tap
        inside = (place >= 0) & (place < tokens)
        x = tl.load(
            rows[None, :] + place.to(tl.int64)[:, None] * row_token, mask=inside[:, None] & real[None, :], other=0.0
        ).to(tl.float32)
        if tap < TAPS - 1:
            old = (place < 0) & (place >= -KEPT) & (tl.zeros_like(place) + first.to(tl.int32) != 0)
            x += tl.load(held[None, :] + (KEPT + place)[:, None], mask=old[:, None] & real[None, :], other=0.0).to(
                tl.float32
            )
        w = tl.load(weight + channel * TAPS + tap, mask=real, other=0.0).to(tl.float32)
        acc += x * w[None, :]
    if BIASED:
        acc += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    y = acc.to(out.dtype.element_ty)
    if SILU:
        z = y.to(tl.float32)
        y = (z / (1.0 + tl.exp(-z))).to(out.dtype.element_ty)
    place = (sequence * tokens + token)[:, None] * channels + channel[None, :]
    tl.store(out + place, y, mask=(token < tokens)[:, None] & real[None, :])
    if first:
        back = tl.arange(0, KEPT_PAD)
        source = tokens + back - KEPT
        wanted = (back < KEPT)[:, None] & real[None, :]
        last = tl.load(
            rows[None, :] + source.to(tl.int64)[:, None] * row_token, mask=wanted & (source >= 0)[:, None], other=0.0
        )
        old_last = tl.load(held[None, :] + (KEPT + source)[:, None], mask=wanted & (source < 0)[:, None], other=0.0)
        last = tl.where((source >= 0)[:, None], last.to(tl.float32), old_last.to(tl.float32))
        after = pool + tl.load(writes + sequence) * slot_size + channel * KEPT
        tl.debug_barrier()  # the slot may be the one that was read
        tl.store(after[None, :] + back[:, None], last.to(pool.dtype.element_ty), mask=wanted)
