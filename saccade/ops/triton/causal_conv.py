"""Causal convolutions by channel whose last rows are kept in slots: a prompt's rows, or a row of each of many
sequences, in one launch that also brings the slots up to date."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.slots import NewRows
from saccade.ops.triton.common import begin, launched, pad

TOKENS, CHANNELS = 32, 128  # of a tile of a prompt


def convolve(given: NewRows, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """``given.rows`` [sequences, channels, tokens] after the rows that their slots [slots, channels, kept] hold,
    convolved with ``weight`` [channels, taps], taps <= kept + 1, and ``bias`` [channels]; with ``silu`` through that.
    Returns the same shape and dtype, a token's channels one after another. Sums are float32, rounded before silu."""
    rows, slots = given.rows, given.slots
    sequences, channels, tokens = rows.shape
    out = torch.empty(sequences, tokens, channels, dtype=rows.dtype, device=rows.device)
    if tokens > 1:
        weight = weight.t().contiguous().t()  # read over and over: the channels of a tap together
    tile, kept = 1 if tokens == 1 else TOKENS, slots.pool.shape[-1]
    _convolve[(triton.cdiv(tokens, tile), triton.cdiv(channels, CHANNELS), sequences)](
        rows, weight, weight if bias is None else bias, out, slots.pool, slots.reads, slots.writes,
        channels, tokens, *rows.stride(), *weight.stride(), slots.pool.stride(0), KEPT=kept, KEPT_PAD=pad(kept, 1),
        TAPS=weight.shape[-1], TOKENS=tile, WIDTH=CHANNELS, BIASED=bias is not None, SILU=silu,
        num_warps=4 if tokens == 1 else 8, **launched(rows.device),
    )  # fmt: skip
    return out.transpose(1, 2)


@triton.jit(do_not_specialize=["tokens"])
def _convolve(
    rows, weight, bias, out, memory, reads, writes, channels, tokens, row_sequence, row_channel, row_token,
    weight_channel, weight_tap, slot_size, KEPT: tl.constexpr, KEPT_PAD: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some tokens of one sequence. Only programs of the first of them look into the slots, and write them."""
    begin(EARLY)
    tile, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = channel < channels
    slot = tl.load(reads + sequence)
    rows += sequence * row_sequence + channel.to(tl.int64) * row_channel
    held = memory + tl.maximum(slot, 0) * slot_size + channel * KEPT
    out += sequence * tokens * channels
    first = (tile == 0) & (slot >= 0)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    acc = tl.zeros([TOKENS, WIDTH], tl.float32)
    if BIASED:
        acc += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        place = token - (TAPS - 1) + tap
        inside = ((place >= 0) & (place < tokens))[:, None] & real[None, :]
        x = tl.load(rows[None, :] + place.to(tl.int64)[:, None] * row_token, mask=inside, other=0.0)
        w = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=real, other=0.0)
        acc += x.to(tl.float32) * w.to(tl.float32)[None, :]
    if first:
        for tap in tl.static_range(TAPS - 1):
            place = token - (TAPS - 1) + tap
            old = ((place < 0) & (place >= -KEPT))[:, None] & real[None, :]
            x = tl.load(held[None, :] + (KEPT + place)[:, None], mask=old, other=0.0)
            w = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=real, other=0.0)
            acc += x.to(tl.float32) * w.to(tl.float32)[None, :]
    y = acc.to(out.dtype.element_ty)
    if SILU:
        z = y.to(tl.float32)
        y = (z / (1.0 + tl.exp(-z))).to(out.dtype.element_ty)
    target = out + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(target, y, mask=(token < tokens)[:, None] & real[None, :])
    if first:
        back = tl.arange(0, KEPT_PAD)
        source = tokens + back - KEPT
        wanted = (back < KEPT)[:, None] & real[None, :]
        last = tl.load(
            rows[None, :] + source.to(tl.int64)[:, None] * row_token, mask=wanted & (source >= 0)[:, None], other=0.0
        )
        old_last = tl.load(held[None, :] + (KEPT + source)[:, None], mask=wanted & (source < 0)[:, None], other=0.0)
        last = tl.where((source >= 0)[:, None], last.to(tl.float32), old_last.to(tl.float32))
        after = memory + tl.load(writes + sequence) * slot_size + channel * KEPT
        tl.debug_barrier()  # the slot may be the one that was read
        tl.store(after[None, :] + back[:, None], last.to(memory.dtype.element_ty), mask=wanted)
