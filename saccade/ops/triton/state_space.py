"""Mamba-2's selective state spaces (Dao and Gu, "Transformers are SSMs", ICML 2024) on a GPU: a token of each of many
sequences in one launch, and prompts 64 tokens at a time, by products of the tensor cores with the state at hand. States
and sums are float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.slots import Slots
from saccade.ops.triton.common import begin, launched, pad, precision

CHUNK = 64  # tokens
WIDTH = 32  # channels of a head that a program takes through the chunks
STEP_VALUES = 4096  # of a state that a program takes through a step


def step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, bias: Tensor | None, soft: bool,
    slots: Slots,
) -> Tensor:  # fmt: skip
    """Outputs like ``x`` [sequences, heads, head_dim]. ``dt`` [sequences, heads], to which ``bias`` [heads] is added
    and which then goes through softplus if ``soft``; ``a``, ``d`` [heads]; ``b``, ``c`` [sequences, groups, size];
    states [slots, heads, head_dim, size]. Rows of padding give zeros."""
    sequences, heads, head_dim = x.shape
    groups, size = b.shape[1:]
    out = torch.empty(sequences, heads, head_dim, dtype=x.dtype, device=x.device)
    x, b, c = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, b, c))
    width = min(pad(head_dim), max(1, STEP_VALUES // pad(size)))
    _step[(triton.cdiv(head_dim, width), heads, sequences)](
        x, dt, a, b, c, a if d is None else d, a if bias is None else bias, out, slots.pool, slots.reads, slots.writes,
        *x.stride()[:2], *dt.stride(), *b.stride()[:2], *c.stride()[:2], a.stride(0), 0 if d is None else d.stride(0),
        0 if bias is None else bias.stride(0), slots.pool.stride(0), HEADS=heads, GROUP=heads // groups, DIM=head_dim,
        SIZE=size, PADDED=pad(size), WIDTH=width, SKIPS=d is not None, BIASED=bias is not None, SOFT=soft, num_warps=4,
        **launched(x.device),
    )  # fmt: skip
    return out


def prompt(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, slots: Slots) -> Tensor:
    """Outputs like ``x`` [sequences, tokens, heads, head_dim], of any number of tokens. ``dt`` [sequences, tokens,
    heads] as it takes part; ``a``, ``d`` [heads]; ``b``, ``c`` [sequences, tokens, groups, size]; states float32
    [slots, heads, head_dim, size], read before the first token and written after the last."""
    sequences, tokens, heads, head_dim = x.shape
    groups, size = b.shape[2:]
    out = torch.empty(sequences, tokens, heads, head_dim, dtype=x.dtype, device=x.device)
    x, b, c = (one if one.stride(-1) == 1 else one.contiguous() for one in (x, b, c))
    width = min(WIDTH, pad(head_dim))
    _scan[(triton.cdiv(head_dim, width), heads, sequences)](
        x, dt, a, b, c, a if d is None else d, out, slots.pool, slots.reads, slots.writes, tokens, *x.stride()[:3],
        *dt.stride(), *b.stride()[:3], *c.stride()[:3], a.stride(0), 0 if d is None else d.stride(0),
        slots.pool.stride(0), HEADS=heads, GROUP=heads // groups, DIM=head_dim, SIZE=size, PADDED=pad(size),
        WIDTH=width, CHUNK=CHUNK, SKIPS=d is not None, PRECISION=precision(x.dtype), num_warps=4,
        num_stages=2 if x.element_size() * pad(size) <= 512 else 1,  # what the shared memory of a Hopper GPU holds
    )  # fmt: skip
    return out


@triton.jit
def _step(
    x, dt, a, b, c, d, bias, out, memory, reads, writes, x_sequence, x_head, dt_sequence, dt_head, b_sequence, b_group,
    c_sequence, c_group, a_head, d_head, bias_head, slot_size, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SKIPS: tl.constexpr,
    BIASED: tl.constexpr, SOFT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some channels of one head of one sequence."""
    begin(EARLY)
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, place = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, PADDED)
    real, known = channel < DIM, place < SIZE
    target = out + (sequence * HEADS + head) * DIM + channel
    slot = tl.load(reads + sequence)
    if slot < 0:
        tl.store(target, tl.zeros([WIDTH], out.dtype.element_ty), mask=real)
    else:
        inner = (head * DIM + channel)[:, None] * SIZE + place[None, :]
        both = real[:, None] & known[None, :]
        state = tl.load(memory + slot * slot_size + inner, mask=both, other=0.0).to(tl.float32)
        value = tl.load(x + sequence * x_sequence + head * x_head + channel, mask=real, other=0.0).to(tl.float32)
        group = head // GROUP
        write = tl.load(b + sequence * b_sequence + group * b_group + place, mask=known, other=0.0).to(tl.float32)
        read = tl.load(c + sequence * c_sequence + group * c_group + place, mask=known, other=0.0).to(tl.float32)
        time = tl.load(dt + sequence * dt_sequence + head * dt_head).to(tl.float32)
        if BIASED:
            time += tl.load(bias + head * bias_head).to(tl.float32)
        if SOFT:
            time = tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.minimum(time, 20.0))))
        state = state * tl.exp(time * tl.load(a + head * a_head).to(tl.float32))
        state += (value * time)[:, None] * write[None, :]
        y = tl.sum(state * read[None, :], 1)
        if SKIPS:
            y += value * tl.load(d + head * d_head).to(tl.float32)
        tl.store(target, y.to(out.dtype.element_ty), mask=real)
        after = memory + tl.load(writes + sequence) * slot_size
        tl.store(after + inner, state.to(memory.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["tokens"])
def _scan(
    x, dt, a, b, c, d, out, memory, reads, writes, tokens, x_sequence, x_token, x_head, dt_sequence, dt_token, dt_head,
    b_sequence, b_token, b_group, c_sequence, c_token, c_group, a_head, d_head, slot_size, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, SKIPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some channels of one head of one sequence, through all its chunks. ``state`` is turned: [size, channels]."""
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, place, row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, PADDED), tl.arange(0, CHUNK)
    real, known = channel < DIM, place < SIZE
    inner = (head * DIM + channel)[None, :] * SIZE + place[:, None]
    both = real[None, :] & known[:, None]
    state = tl.load(memory + tl.load(reads + sequence) * slot_size + inner, mask=both, other=0.0).to(tl.float32)
    rate = tl.load(a + head * a_head).to(tl.float32)
    x += sequence * x_sequence + head * x_head
    dt += sequence * dt_sequence + head * dt_head
    b += sequence * b_sequence + (head // GROUP) * b_group
    c += sequence * c_sequence + (head // GROUP) * c_group
    out += (sequence * tokens * HEADS + head) * DIM
    past = row[:, None] - row[None, :]
    for chunk in tl.range(0, tl.cdiv(tokens, CHUNK)):
        token = (chunk * CHUNK + row).to(tl.int64)
        there = token < tokens
        wanted, shown = there[:, None] & known[None, :], there[:, None] & real[None, :]
        write = tl.load(b + token[:, None] * b_token + place[None, :], mask=wanted, other=0.0)
        read = tl.load(c + token[:, None] * c_token + place[None, :], mask=wanted, other=0.0)
        values = tl.load(x + token[:, None] * x_token + channel[None, :], mask=shown, other=0.0).to(tl.float32)
        time = tl.load(dt + token * dt_token, mask=there, other=0.0).to(tl.float32)
        total = tl.cumsum(time * rate, 0)
        whole = tl.sum(time * rate, 0)
        fading = tl.exp(tl.where(past >= 0, total[:, None] - total[None, :], 0.0)) * time[None, :]
        weighed = tl.dot(read, tl.trans(write), input_precision=PRECISION) * fading
        weighed = tl.where(past >= 0, weighed, 0.0).to(write.dtype)
        y = tl.dot(read, state.to(write.dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
        y = tl.dot(weighed, values.to(write.dtype), y, input_precision=PRECISION)
        if SKIPS:
            y += values * tl.load(d + head * d_head).to(tl.float32)
        tl.store(out + token[:, None] * HEADS * DIM + channel[None, :], y.to(out.dtype.element_ty), mask=shown)
        new = (values * (time * tl.exp(whole - total))[:, None]).to(write.dtype)
        state = tl.dot(tl.trans(write), new, state * tl.exp(whole), input_precision=PRECISION)
    after = memory + tl.load(writes + sequence) * slot_size
    tl.store(after + inner, state.to(memory.dtype.element_ty), mask=both)
