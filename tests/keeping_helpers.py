"""What tests of kernels of layers that keep a state share: their rules in float64, and inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.ops.slots import Slots


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token in float64: outputs [sequences, tokens, value heads, d_v], the last states.
    Shapes as of ``ops.triton.delta_chunks.prompt``; ``state`` [sequences, value heads, d_k, d_v]."""
    q, k, v, g, beta, state = (one.cpu().double() for one in (q, k, v, g, beta, state))
    q, k = (one.repeat_interleave(v.shape[2] // k.shape[2], 2) for one in (q, k))
    if normed:
        q, k = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    q = q * q.shape[-1] ** -0.5
    outs = []
    for at in range(q.shape[1]):
        key = k[:, at, :, :, None]
        state = state * g[:, at, :, None, None].exp()
        delta = (v[:, at, :, None] - (state * key).sum(-2, keepdim=True)) * beta[:, at, :, None, None]
        state = state + key * delta
        outs.append((state * q[:, at, :, :, None]).sum(-2))
    return torch.stack(outs, 1), state


def delta_inputs(sequences, tokens, key_heads, heads, d_k, d_v, *, dtype=torch.float32, alike=False, seed=0):
    """q, k, v, g, beta. ``alike``: keys that are nearly the same, with rates near 1 and no decay, as of a token that is
    said over and over: the system of a chunk is at its worst."""
    rng = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, sequences, tokens, key_heads, d_k, generator=rng)
    v = torch.randn(sequences, tokens, heads, d_v, generator=rng)
    g = -torch.nn.functional.softplus(2 * torch.randn(sequences, tokens, heads, generator=rng))
    beta = torch.rand(sequences, tokens, heads, generator=rng)
    if alike:
        k = k[:, :1] + 1e-3 * k
        g, beta = g * 1e-3, 1 - 1e-3 * beta
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype)


def convolution(rows: Tensor, held: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    """``rows`` [sequences, channels, tokens] behind ``held`` [sequences, channels, kept], in float64: the outputs, and
    what is held then."""
    rows, held, weight = (one.cpu().double() for one in (rows, held, weight))
    whole = torch.cat([held, rows], -1)
    windows = torch.nn.functional.pad(whole, (weight.shape[-1] - 1, 0)).unfold(-1, weight.shape[-1], 1)
    out = (windows * weight[None, :, None]).sum(-1)[..., -rows.shape[-1] :]
    out = out if bias is None else out + bias.cpu().double()[:, None]
    return torch.nn.functional.silu(out) if silu else out, whole[..., -held.shape[-1] :]


def state_space(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba-2's recurrence token by token in float64. ``x`` [sequences, tokens, heads, head_dim], ``dt`` [sequences,
    tokens, heads] as it takes part, ``a`` and ``d`` [heads], ``b``, ``c`` [sequences, tokens, groups, size], ``state``
    [sequences, heads, head_dim, size]: outputs like x, the last states."""
    x, dt, a, b, c, state = (one.cpu().double() for one in (x, dt, a, b, c, state))
    b, c = (one.repeat_interleave(x.shape[2] // b.shape[2], 2) for one in (b, c))
    outs = []
    for at in range(x.shape[1]):
        step = dt[:, at, :, None, None]
        state = state * (step * a[:, None, None]).exp() + step * x[:, at, :, :, None] * b[:, at, :, None]
        outs.append((state * c[:, at, :, None]).sum(-1))
    out = torch.stack(outs, 1)
    return out if d is None else out + x * d.cpu().double()[:, None], state


def space_inputs(sequences, tokens, heads, head_dim, groups, size, *, dtype=torch.float32, seed=0):
    """x, dt, a, b, c, d of :func:`state_space`, and a bias of dt."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(sequences, tokens, heads, head_dim, generator=rng)
    dt = torch.randn(sequences, tokens, heads, generator=rng)
    b, c = torch.randn(2, sequences, tokens, groups, size, generator=rng)
    a, d, bias = -4 * torch.rand(heads, generator=rng), *torch.randn(2, heads, generator=rng)
    return x.to(dtype), dt, a, b.to(dtype), c.to(dtype), d, bias


def slots_of(shape, sequences, *, device="cpu", dtype=torch.float32, apart=False, padding=()) -> Slots:
    """Slots in no order, of a pool twice as large; ``apart``: what is read is not written."""
    rng = torch.Generator().manual_seed(7)
    pool = torch.randn(2 * sequences + 1, *shape, generator=rng).to(device, dtype)
    order = torch.randperm(2 * sequences + 1, generator=rng).to(device)
    reads = order[:sequences].clone()
    writes = order[sequences : 2 * sequences].clone() if apart else reads.clone()
    for at in padding:
        reads[at] = writes[at] = -1
    return Slots(pool, reads, writes)


def others_untouched(before: Tensor, slots: Slots) -> None:
    """What no sequence writes is as it was."""
    kept = torch.ones(len(before), dtype=torch.bool, device=before.device)
    kept[slots.writes[slots.writes >= 0]] = False
    assert torch.equal(before[kept], slots.pool[kept])
