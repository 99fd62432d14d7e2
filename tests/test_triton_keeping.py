"""Kernels of layers that keep a state against float64, under Triton's interpreter: ragged tiles, permuted slots, slots
that are read in one place and written in another, padding, and systems at their worst."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from keeping_helpers import convolution, delta_inputs, delta_rule, others_untouched, slots_of, space_inputs
from keeping_helpers import state_space as reference

from saccade.ops.slots import NewRows
from saccade.ops.triton import delta_chunks, state_space
from saccade.ops.triton.causal_conv import convolve
from saccade.ops.triton.delta_chunks import prompt
from saccade.ops.triton.delta_rule import step

NEAR = {"atol": 2e-5, "rtol": 2e-5}


def test_prompts_whose_heads_are_too_wide_for_chunks_go_by_steps(monkeypatch):
    monkeypatch.setattr(delta_chunks, "MOST_BYTES", 32)
    inputs = delta_inputs(2, 3, 1, 2, 16, 24)
    slots = slots_of((2, 16, 24), 2, apart=True)
    before = slots.pool.clone()
    out = prompt(*inputs, slots, True)
    expected, after = delta_rule(*inputs, before[slots.reads], True)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slots.pool[slots.writes].double(), after, atol=1e-5, rtol=1e-5)
    others_untouched(before, slots)


@pytest.mark.parametrize("tokens", [1, 2, 37, 64])
@pytest.mark.parametrize(
    ("taps", "kept", "bias", "silu"), [(4, 4, False, True), (3, 3, True, False), (2, 4, True, True)]
)
def test_convolutions(tokens, taps, kept, bias, silu):
    sequences, channels = (3, 130) if tokens == 1 else (2, 40)
    rng = torch.Generator().manual_seed(tokens)
    rows = torch.randn(sequences, tokens, channels + 5, generator=rng)[..., 2 : channels + 2].transpose(1, 2)
    weight = torch.randn(channels, taps, generator=rng)
    bias = torch.randn(channels, generator=rng) if bias else None
    for apart in (False, True):
        slots = slots_of((channels, kept), sequences, apart=apart)
        before = slots.pool.clone()
        out = convolve(NewRows(rows, slots), weight, bias, silu)
        expected, after = convolution(rows, before[slots.reads], weight, bias, silu)
        torch.testing.assert_close(out.double(), expected, **NEAR)
        torch.testing.assert_close(slots.pool[slots.writes].double(), after, atol=0, rtol=0)
        others_untouched(before, slots)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("key_heads", "heads", "d_k", "d_v"), [(2, 4, 16, 24), (1, 3, 20, 40)])
def test_steps(key_heads, heads, d_k, d_v, normed):
    q, k, v, g, beta = delta_inputs(4, 1, key_heads, heads, d_k, d_v)
    for apart in (False, True):
        slots = slots_of((heads, d_k, d_v), 4, apart=apart, padding=(2,))
        before, real = slots.pool.clone(), slots.reads >= 0
        out = step(q, k, v, g, beta, slots, normed)
        own = [one[real] for one in (q, k, v, g, beta)]
        expected, after = delta_rule(*own, before[slots.reads[real]], normed)
        torch.testing.assert_close(out[real].double(), expected, **NEAR)
        torch.testing.assert_close(slots.pool[slots.writes[real]].double(), after, **NEAR)
        assert not out[~real].any()
        others_untouched(before, slots)


@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
@pytest.mark.parametrize("alike", [False, True])
def test_prompts(tokens, alike):
    sequences, key_heads, heads, d_k, d_v = 2, 1, 2, 20, 40
    inputs = delta_inputs(sequences, tokens, key_heads, heads, d_k, d_v, alike=alike, seed=tokens)
    slots = slots_of((heads, d_k, d_v), sequences, apart=tokens % 2 == 0)
    before = slots.pool.clone()
    out = prompt(*inputs, slots, True)
    expected, after = delta_rule(*inputs, before[slots.reads], True)
    bound = {"atol": 1e-4, "rtol": 1e-4} if alike else NEAR
    torch.testing.assert_close(out.double(), expected, **bound)
    torch.testing.assert_close(slots.pool[slots.writes].double(), after, **bound)
    others_untouched(before, slots)


@pytest.mark.parametrize(("heads", "head_dim", "groups", "size"), [(4, 24, 2, 16), (3, 40, 1, 20)])
def test_steps_of_state_spaces(heads, head_dim, groups, size):
    x, dt, a, b, c, d, bias = space_inputs(4, 1, heads, head_dim, groups, size)
    dt[0, 0, 0] = 25.0  # as good as its own softplus
    for apart in (False, True):
        slots = slots_of((heads, head_dim, size), 4, apart=apart, padding=(1,))
        before, real = slots.pool.clone(), slots.reads >= 0
        rows = [one[:, 0] for one in (x, dt, b, c)]
        own = (a, d, bias) if apart else (a, None, None)
        out = state_space.step(*rows[:2], own[0], *rows[2:], own[1], own[2], apart, slots)
        times = torch.nn.functional.softplus(dt + bias) if apart else dt
        expected, after = reference(
            *(one[real] for one in (x, times)), a, *(one[real] for one in (b, c)), own[1], before[slots.reads[real]]
        )
        torch.testing.assert_close(out[real].double(), expected[:, 0], **NEAR)
        torch.testing.assert_close(slots.pool[slots.writes[real]].double(), after, **NEAR)
        assert not out[~real].any()
        others_untouched(before, slots)


@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
def test_prompts_of_state_spaces(tokens):
    x, dt, a, b, c, d, _ = space_inputs(2, tokens, 2, 40, 1, 20, seed=tokens)
    times, skip = torch.nn.functional.softplus(dt), d if tokens % 2 else None
    slots = slots_of((2, 40, 20), 2, apart=tokens % 2 == 0)
    before = slots.pool.clone()
    out = state_space.prompt(x, times, a, b, c, skip, slots)
    expected, after = reference(x, times, a, b, c, skip, before[slots.reads])
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(slots.pool[slots.writes].double(), after, atol=1e-4, rtol=1e-4)
    others_untouched(before, slots)
