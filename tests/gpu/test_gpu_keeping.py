"""Kernels of layers that keep a state against float64 on a GPU: ragged lengths, permuted slots, slots that are read in
one place and written in another, padding, and systems at their worst."""

from __future__ import annotations

import pytest
import torch
from gpu_keeping import TYPES, gpu_slots, near
from keeping_helpers import convolution, delta_inputs, delta_rule, others_untouched, space_inputs
from keeping_helpers import state_space as reference

from saccade.ops.slots import NewRows
from saccade.ops.triton import state_space
from saccade.ops.triton.causal_conv import convolve
from saccade.ops.triton.delta_rule import step


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (33, 1), (2, 2), (1, 1000)])
@pytest.mark.parametrize(("taps", "bias", "silu"), [(4, False, True), (3, True, False)])
def test_convolutions(dtype, sequences, tokens, taps, bias, silu):
    rng = torch.Generator().manual_seed(tokens)
    channels = 1000
    rows = torch.randn(sequences, tokens, channels + 24, generator=rng).to("cuda", dtype)
    rows = rows[..., 8 : channels + 8].transpose(1, 2)
    weight, bias = torch.randn(channels, taps, generator=rng), torch.randn(channels, generator=rng) if bias else None
    weight, bias = weight.to("cuda", dtype), None if bias is None else bias.to("cuda", dtype)
    for apart in (False, True):
        slots = gpu_slots((channels, taps), sequences, dtype=dtype, apart=apart)
        before = slots.pool.clone()
        out = convolve(NewRows(rows, slots), weight, bias, silu)
        expected, after = convolution(rows, before[slots.reads], weight, bias, silu)
        near(out, expected, dtype, "out")
        assert torch.equal(slots.pool[slots.writes].cpu().double(), after)
        others_untouched(before, slots)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("sequences", "key_heads", "heads", "d_k", "d_v"),
    [(1, 16, 48, 128, 128), (8, 16, 32, 128, 128), (33, 2, 2, 256, 64), (3, 4, 8, 96, 192)],
)
def test_steps(dtype, sequences, key_heads, heads, d_k, d_v):
    inputs = [one.cuda() for one in delta_inputs(sequences, 1, key_heads, heads, d_k, d_v, dtype=dtype)]
    for apart in (False, True):
        padding = (1,) if sequences > 2 else ()
        slots = gpu_slots((heads, d_k, d_v), sequences, apart=apart, padding=padding)
        before, real = slots.pool.clone(), slots.reads >= 0
        out = step(*inputs, slots, True)
        expected, after = delta_rule(*(one[real] for one in inputs), before[slots.reads[real]], True)
        near(out[real], expected, dtype, "out")
        near(slots.pool[slots.writes[real]], after, torch.float32, "state")
        assert not out[~real].any()
        others_untouched(before, slots)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("sequences", "heads", "head_dim", "groups", "size"), [(1, 48, 64, 1, 128), (9, 24, 64, 2, 256), (3, 6, 96, 1, 16)]
)
def test_state_spaces(dtype, sequences, heads, head_dim, groups, size):
    for tokens in (1, 150):
        inputs = space_inputs(sequences, tokens, heads, head_dim, groups, size, dtype=dtype, seed=tokens)
        x, dt, a, b, c, d, bias = (one.cuda() for one in inputs)
        times = torch.nn.functional.softplus(dt + bias)
        for apart in (False, True):
            slots = gpu_slots((heads, head_dim, size), sequences, apart=apart)
            before = slots.pool.clone()
            if tokens == 1:
                out = state_space.step(x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], d, bias, True, slots)[:, None]
            else:
                out = state_space.prompt(x, times, a, b, c, d, slots)
            expected, after = reference(x, times, a, b, c, d, before[slots.reads])
            near(out, expected, dtype, "out")
            near(slots.pool[slots.writes], after, torch.float32 if tokens == 1 else dtype, "state")
            others_untouched(before, slots)
