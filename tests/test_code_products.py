"""Products of codes, which kernels of decode make on a GPU in 16 bits: queries, scales, weights and sums of them in
Triton's interpreter, where codes become float16 by torch's rules instead of a GPU's instructions."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from coded_rows import rounded
from helpers import generator, planted_heads, random_selection

from saccade.kv import KVView
from saccade.kv.row_formats import FP8, INT8
from saccade.ops import Call, run
from saccade.ops.triton import code_products, readers
from saccade.ops.triton.few_rows import attend_few
from saccade.ops.triton.row_codes import e4m3_numbers
from saccade.selection import Shape


@triton.jit
def halves(codes):
    return codes.to(tl.float16)


@triton.jit
def pairs(both):
    wide = both.to(tl.int32)
    return ((wide << 24) >> 24).to(tl.float16), ((wide << 16) >> 24).to(tl.float16)


@triton.jit
def e4m3(both):
    wide = both.to(tl.int32)
    return e4m3_numbers(wide & 0xFF).to(tl.float16), e4m3_numbers(wide >> 8).to(tl.float16)


@pytest.fixture(autouse=True)
def multiplied(monkeypatch):
    """As on a GPU that has the instructions."""
    made = []

    def in_codes(stored, TYPE, LINES):
        made.append(stored in (tl.uint8, tl.int8) and tl.float16 == TYPE and LINES <= 16)
        return made[-1]

    for module in (readers, code_products):
        monkeypatch.setattr(module, "in_codes", in_codes)
    monkeypatch.setattr(readers, "int8_halves", halves)
    monkeypatch.setattr(readers, "int8_pairs", pairs)
    monkeypatch.setattr(readers, "e4m3_pairs", e4m3)
    yield
    assert any(made)


@pytest.mark.parametrize(("rows", "head_dim"), [
    (INT8, 192), *(pytest.param(*one, marks=pytest.mark.thorough) for one in (
        (INT8, 64), (INT8, 80), (INT8, 256), (FP8, 64), (FP8, 80), (FP8, 192)
    )),
])  # fmt: skip
def test_decode_is_attention_over_the_numbers(rows, head_dim):
    n, rng = 90, generator(0)
    q, k, v = planted_heads(4, 2, n, head_dim, seed=n)
    v[:, 5] *= 40
    v[1, 8:40] *= 2.0**-12
    k[:, 9] *= 30
    q, k, v = (part.to(torch.float16) for part in (q, k, v))
    coded = KVView.from_tensors(k, v, 32, shuffle_seed=1, rows=rows)
    plain = KVView.from_tensors(rounded(k.float(), rows), rounded(v.float(), rows), 32, shuffle_seed=2)
    shape = Shape.suffix(4, 2, 1, n)
    for kind in ("dense", "blocks", "tokens", "ranking"):
        selection = random_selection(kind, shape, 2, rng)
        for factor in (1.0, 1e-4) if kind == "dense" else (1.0,):
            ours = run(Call.of(q[:, -1:] * factor, coded, selection), "triton")
            want = run(Call.of((q[:, -1:] * factor).float(), plain, selection), "reference")
            torch.testing.assert_close(ours.lse, want.lse, atol=2e-3, rtol=2e-3)
            assert float((ours.out - want.out).norm() / want.out.norm()) < 1e-3, (kind, factor)
    for count in (3, 6):  # of 8 lines of a product, and of 16
        few, _ = attend_few(q[:, -count:], [coded], scale=0.1)
        dense = random_selection("dense", Shape.suffix(4, 2, count, n), 2, rng)
        want = run(Call.of(q[:, -count:].float(), plain, dense, scale=0.1), "reference")
        assert float((few - want.out).norm() / want.out.norm()) < 1e-3
