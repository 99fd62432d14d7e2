"""Kernels of layers that keep a state against float64 on a GPU: ragged lengths, permuted slots, slots that are read in
one place and written in another, padding, and systems at their worst."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import BOUND
from keeping_helpers import convolution, delta_inputs, delta_rule
from keeping_helpers import state_space as reference

from saccade.ops.slots import NewRows, Slots
from saccade.ops.triton import state_space
from saccade.ops.triton.causal_conv import convolve
from saccade.ops.triton.delta_chunks import prompt
from saccade.ops.triton.delta_rule import step

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def slots_of(shape, sequences, *, dtype=torch.float32, apart=False, padding=()):
    rng = torch.Generator().manual_seed(7)
    pool = torch.randn(2 * sequences + 1, *shape, generator=rng).to("cuda", dtype)
    order = torch.randperm(2 * sequences + 1, generator=rng).cuda()
    reads = order[:sequences].clone()
    writes = order[sequences : 2 * sequences].clone() if apart else reads.clone()
    for at in padding:
        reads[at] = writes[at] = -1
    return Slots(pool, reads, writes)


def near(out, expected, dtype, what):
    assert torch.isfinite(out).all(), what
    error = float((out.cpu().double() - expected).norm() / expected.norm())
    assert error < BOUND[dtype], (what, error)


def others_untouched(before, slots):
    kept = torch.ones(len(before), dtype=torch.bool, device="cuda")
    kept[slots.writes[slots.writes >= 0]] = False
    assert torch.equal(before[kept], slots.pool[kept])


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
        slots = slots_of((channels, taps), sequences, dtype=dtype, apart=apart)
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
        slots = slots_of((heads, d_k, d_v), sequences, apart=apart, padding=padding)
        before, real = slots.pool.clone(), slots.reads >= 0
        out = step(*inputs, slots, True)
        expected, after = delta_rule(*(one[real] for one in inputs), before[slots.reads[real]], True)
        near(out[real], expected, dtype, "out")
        near(slots.pool[slots.writes[real]], after, torch.float32, "state")
        assert not out[~real].any()
        others_untouched(before, slots)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("sequences", "tokens", "key_heads", "heads", "d_k", "d_v"),
    [(1, 300, 4, 12, 128, 128), (2, 64, 2, 4, 128, 128), (3, 2, 2, 2, 96, 192), (1, 129, 1, 2, 256, 64)],
)
def test_prompts(dtype, alike, sequences, tokens, key_heads, heads, d_k, d_v):
    inputs = delta_inputs(sequences, tokens, key_heads, heads, d_k, d_v, dtype=dtype, alike=alike, seed=tokens)
    inputs = [one.cuda() for one in inputs]
    slots = slots_of((heads, d_k, d_v), sequences, apart=tokens % 2 == 0)
    before = slots.pool.clone()
    out = prompt(*inputs, slots, True)
    expected, after = delta_rule(*inputs, before[slots.reads], True)
    near(out, expected, dtype, "out")
    near(slots.pool[slots.writes], after, dtype, "state")
    others_untouched(before, slots)


def test_a_prompt_in_two_and_token_by_token():
    q, k, v, g, beta = (one.cuda() for one in delta_inputs(1, 200, 2, 6, 128, 128))
    whole, cut, steps = (slots_of((6, 128, 128), 1) for _ in range(3))
    expected = prompt(q, k, v, g, beta, whole, True)
    parts = [prompt(*(one[:, at] for one in (q, k, v, g, beta)), cut, True) for at in (slice(0, 77), slice(77, 200))]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cut.pool, whole.pool, atol=1e-4, rtol=1e-4)
    tokens = [step(*(one[:, at : at + 1] for one in (q, k, v, g, beta)), steps, True) for at in range(200)]
    torch.testing.assert_close(torch.cat(tokens, 1), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(steps.pool, whole.pool, atol=1e-4, rtol=1e-4)


def space_inputs(sequences, tokens, heads, head_dim, groups, size, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(sequences, tokens, heads, head_dim, generator=rng)
    dt = torch.randn(sequences, tokens, heads, generator=rng)
    b, c = torch.randn(2, sequences, tokens, groups, size, generator=rng)
    a, d, bias = -4 * torch.rand(heads, generator=rng), *torch.randn(2, heads, generator=rng)
    return [one.cuda() for one in (x.to(dtype), dt, a, b.to(dtype), c.to(dtype), d, bias)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("sequences", "heads", "head_dim", "groups", "size"), [(1, 48, 64, 1, 128), (9, 24, 64, 2, 256), (3, 6, 96, 1, 16)]
)
def test_state_spaces(dtype, sequences, heads, head_dim, groups, size):
    for tokens in (1, 150):
        x, dt, a, b, c, d, bias = space_inputs(sequences, tokens, heads, head_dim, groups, size, dtype, seed=tokens)
        times = torch.nn.functional.softplus(dt + bias)
        for apart in (False, True):
            slots = slots_of((heads, head_dim, size), sequences, apart=apart)
            before = slots.pool.clone()
            if tokens == 1:
                out = state_space.step(x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], d, bias, True, slots)[:, None]
            else:
                out = state_space.prompt(x, times, a, b, c, d, slots)
            expected, after = reference(x, times, a, b, c, d, before[slots.reads])
            near(out, expected, dtype, "out")
            near(slots.pool[slots.writes], after, torch.float32 if tokens == 1 else dtype, "state")
            others_untouched(before, slots)
