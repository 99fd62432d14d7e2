"""Tiles of decode are as large as a GPU's shared memory: calls of many rows and wide heads."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from helpers import generator, planted_heads, random_selection

from saccade.kv import KVView
from saccade.ops import Call, run
from saccade.ops.triton import decode, dispatch
from saccade.ops.triton.decode import CODES, FEW_CODES, FEW_SCALED, MANY_CODES, PLAIN, fitting, most_lines
from saccade.ops.triton.few_rows import LARGE, TILE, attend_few, attend_groups
from saccade.selection import Dense, Shape

HOPPER = 232_448  # bytes that one program may have


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_queries_and_keys_fit_a_hopper_gpu(dtype, head_dim):
    q = torch.zeros(1, 1, head_dim, dtype=dtype)
    wide = 1 << (head_dim - 1).bit_length()
    assert most_lines(q) >= 32
    for tiles in (PLAIN, CODES, FEW_CODES, FEW_SCALED, MANY_CODES, LARGE):
        for lines in (1, 16, 33, most_lines(q)):
            cut = fitting(tiles, q, lines)
            rows = 1 << max(4, (lines - 1).bit_length())
            queries = rows * wide * dtype.itemsize * (1 + (dtype == torch.float32))
            assert queries + 2 * cut.keys * cut.stages * wide * dtype.itemsize < HOPPER, (tiles, lines)
            assert cut.keys >= 16
            assert cut.stages >= 2
    assert fitting(LARGE, torch.zeros(1, 1, 128, dtype=torch.bfloat16), 64) == LARGE  # what was measured stays


def test_rows_of_more_heads_than_a_tile_has_see_no_later_keys():
    """Each row is a group of its own then."""
    heads, rows, n = 2 * TILE + 2, 3, 40
    q, k, v = planted_heads(heads, 2, n, 16, seed=1)
    view, shape = KVView.from_tensors(k, v, 16, shuffle_seed=1), Shape.suffix(heads, 2, rows, n)
    want = run(Call.of(q[:, -rows:], view, Dense(shape), scale=0.2), "reference")
    out, lse = attend_groups(q[:, -rows:], view, n - rows, scale=0.2)
    torch.testing.assert_close(out, want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "rows", "most"), [(12, 5, 16), (6, 20, 16), (7, 2, 8)])
def test_heads_of_too_many_rows_are_served_by_several_programs(heads, rows, most, monkeypatch):
    n, taken = 90, []
    q, k, v = planted_heads(heads, 1, n, 32, seed=heads)
    view, shape = KVView.from_tensors(k, v, 16, shuffle_seed=1), Shape.suffix(heads, 1, rows, n)
    want = run(Call.of(q[:, -rows:], view, Dense(shape), scale=0.2), "reference")
    held = 32 * 4 * 2
    monkeypatch.setattr(decode, "QUERIES", most * held)
    real = decode.fitting

    def noted(tiles, q, lines):
        taken.append(lines)
        return real(tiles, q, lines)

    monkeypatch.setattr(decode, "fitting", noted)
    for make in (
        lambda: attend_few(q[:, -rows:], [view], scale=0.2),
        lambda: attend_groups(q[:, -rows:], view, n - rows, scale=0.2),
    ):
        out, lse = make()
        torch.testing.assert_close(out, want.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, want.lse, atol=1e-5, rtol=1e-5)
    assert max(taken) <= max(most, rows)
    assert max(taken) < heads * rows or heads * rows <= most


def test_lines_of_wide_float32_heads_are_refused_by_name():
    for dtype, head_dim, kind, refused in (
        (torch.float32, 192, "lines", True), (torch.float32, 256, "mixed", True), (torch.float32, 128, "lines", False),
        (torch.float32, 256, "blocks", False), (torch.bfloat16, 256, "lines", False),
    ):  # fmt: skip
        q, k, v = (part.to(dtype) for part in planted_heads(2, 2, 40, head_dim, seed=1))
        view = KVView.from_tensors(k, v, 16)
        selection = random_selection(kind, Shape.suffix(2, 2, 20, 40), 2, generator(0))
        reason = dispatch.serves(q[:, -20:], view, selection)
        assert reason == (f"it reads lines of float32 heads of up to 128 channels; got {head_dim}" if refused else None)
