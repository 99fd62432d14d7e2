"""The gated delta rule by chunks against float64 on a GPU: ragged ends, permuted slots, and systems at their worst."""

from __future__ import annotations

import pytest
import torch
from gpu_keeping import TYPES, gpu_slots, near
from keeping_helpers import delta_inputs, delta_rule, others_untouched

from saccade.ops.triton.delta_chunks import prompt
from saccade.ops.triton.delta_rule import step

SHAPES = [(1, 300, 4, 12, 128, 128), (2, 64, 2, 4, 128, 128), (3, 2, 2, 2, 96, 192), (1, 129, 1, 2, 256, 64)]
WIDE = (1, 12, 1, 2, 256, 64)  # of which chunks in float32 do not fit: token by token
# Products of three tf32 take the compiler half a minute for heads of 128.
CASES = [(dtype, shape) for dtype in TYPES[:2] for shape in SHAPES]
CASES += [(TYPES[2], shape) for shape in ((2, 130, 2, 4, 64, 64), WIDE)]


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("dtype", "sequences", "tokens", "key_heads", "heads", "d_k", "d_v"), [(dtype, *shape) for dtype, shape in CASES]
)
def test_prompts(dtype, alike, sequences, tokens, key_heads, heads, d_k, d_v):
    inputs = delta_inputs(sequences, tokens, key_heads, heads, d_k, d_v, dtype=dtype, alike=alike, seed=tokens)
    inputs = [one.cuda() for one in inputs]
    slots = gpu_slots((heads, d_k, d_v), sequences, apart=tokens % 2 == 0)
    before = slots.pool.clone()
    out = prompt(*inputs, slots, True)
    expected, after = delta_rule(*inputs, before[slots.reads], True)
    near(out, expected, dtype, "out")
    near(slots.pool[slots.writes], after, dtype, "state")
    others_untouched(before, slots)


def test_a_prompt_in_two_and_token_by_token():
    q, k, v, g, beta = (one.cuda() for one in delta_inputs(1, 200, 2, 4, 64, 64))
    whole, cut, steps = (gpu_slots((4, 64, 64), 1) for _ in range(3))
    expected = prompt(q, k, v, g, beta, whole, True)
    parts = [prompt(*(one[:, at] for one in (q, k, v, g, beta)), cut, True) for at in (slice(0, 77), slice(77, 200))]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cut.pool, whole.pool, atol=1e-4, rtol=1e-4)
    tokens = [step(*(one[:, at : at + 1] for one in (q, k, v, g, beta)), steps, True) for at in range(200)]
    torch.testing.assert_close(torch.cat(tokens, 1), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(steps.pool, whole.pool, atol=1e-4, rtol=1e-4)
