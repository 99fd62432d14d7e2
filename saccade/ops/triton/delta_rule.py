"""The gated delta rule (Yang et al., "Gated Delta Networks", ICLR 2025) on a GPU, a token of each of many sequences: a
launch that reads each state once and writes it once, where the slots say."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.slots import Slots
from saccade.ops.triton.common import begin, launched, pad

CHANNELS = 16  # of a value head that a program takes
WARPS = 1
NORM = 1e-6  # beside the squares of a query or key that is normed


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, slots: Slots, normed: bool) -> Tensor:
    """Outputs [sequences, 1, value heads, d_v] in the dtype of ``q``.

    ``q``, ``k`` [sequences, 1, key heads, d_k], ``v`` as the outputs; ``g`` (the logarithm of the decay) and ``beta``
    [sequences, 1, value heads]; states [slots, value heads, d_k, d_v]. With ``normed`` queries and keys are divided by
    their length first. Computed in float32. Rows of padding give zeros.
    """
    sequences, _, key_heads, d_k = k.shape
    heads, d_v = v.shape[-2:]
    out = torch.empty(sequences, 1, heads, d_v, dtype=q.dtype, device=q.device)
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    width = min(CHANNELS, pad(d_v))
    _step[(triton.cdiv(d_v, width), heads, sequences)](
        q, k, v, g, beta, out, slots.pool, slots.reads, slots.writes, d_k**-0.5, q.stride(0), q.stride(2), k.stride(0),
        k.stride(2), v.stride(0), v.stride(2), g.stride(0), g.stride(2), beta.stride(0), beta.stride(2),
        slots.pool.stride(0), HEADS=heads, GROUP=heads // key_heads, D_K=d_k, D_V=d_v, K_PAD=pad(d_k), WIDTH=width,
        NORMED=normed, NORM=NORM, num_warps=WARPS, **launched(q.device),
    )  # fmt: skip
    return out


@triton.jit
def _step(
    q, k, v, g, beta, out, memory, reads, writes, scale, q_sequence, q_head, k_sequence, k_head, v_sequence, v_head,
    g_sequence, g_head, beta_sequence, beta_head, slot_size, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D_K: tl.constexpr, D_V: tl.constexpr, K_PAD: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr,
    NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some channels of one value head of one sequence."""
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, dim = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, K_PAD)
    real, known = channel < D_V, dim < D_K
    place = (sequence * HEADS + head) * D_V + channel
    slot = tl.load(reads + sequence)
    inner = (head * D_K + dim)[:, None] * D_V + channel[None, :]
    both = known[:, None] & real[None, :]
    # What the kernel right before this one does not write: the step before has ended long ago.
    state = tl.load(memory + tl.maximum(slot, 0) * slot_size + inner, mask=both, other=0.0).to(tl.float32)
    begin(EARLY)
    if slot < 0:
        tl.store(out + place, tl.zeros([WIDTH], out.dtype.element_ty), mask=real)
    else:
        key = tl.load(k + sequence * k_sequence + (head // GROUP) * k_head + dim, mask=known, other=0.0).to(tl.float32)
        query = tl.load(q + sequence * q_sequence + (head // GROUP) * q_head + dim, mask=known, other=0.0)
        query = query.to(tl.float32) * scale
        if NORMED:
            key = key * tl.rsqrt(tl.sum(key * key, 0) + NORM)
            query = query * tl.rsqrt(tl.sum(query * query, 0) / (scale * scale) + NORM)
        value = tl.load(v + sequence * v_sequence + head * v_head + channel, mask=real, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(g + sequence * g_sequence + head * g_head).to(tl.float32))
        rate = tl.load(beta + sequence * beta_sequence + head * beta_head).to(tl.float32)
        state = state * decay
        delta = (value - tl.sum(state * key[:, None], 0)) * rate
        state += key[:, None] * delta[None, :]
        y = tl.sum(state * query[:, None], 0)
        tl.store(out + place, y.to(out.dtype.element_ty), mask=real)
        after = memory + tl.load(writes + sequence) * slot_size
        tl.store(after + inner, state.to(memory.dtype.element_ty), mask=both)
