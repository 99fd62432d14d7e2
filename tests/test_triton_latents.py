"""The kernels of decode over latents against float64, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from latent_helpers import WIDTHS, Latents, exact

from saccade.ops.triton.latents import Tiles, attend_latents, share_of

BOUND = {torch.float32: 1e-5, torch.float16: 3e-3}


def close(got, expected, dtype=torch.float32):
    """Of what counts of (out, lse)."""
    for row, (out, lse) in enumerate(expected):
        width = out.shape[-1]
        mine, theirs = got[0][row, :, :width].double(), got[1][row].double()
        torch.testing.assert_close(mine, out, atol=BOUND[dtype], rtol=BOUND[dtype])
        torch.testing.assert_close(theirs, lse, atol=BOUND[dtype], rtol=BOUND[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [1, 6, 16, 40])
@pytest.mark.parametrize("widths", WIDTHS)
def test_all_keys_of_unequal_rows(widths, heads, dtype):
    rows = Latents([1, 0, 64, 333], widths, heads, dtype)
    close(attend_latents(rows.q, rows.pages, None, scale=0.2), exact(rows, scale=0.2), dtype)


@pytest.mark.parametrize("tiles", [Tiles(16, 16, 4, 2, 1), Tiles(64, 32, 8, 2, 1), Tiles(32, 64, 4, 2, 1)])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_tiles_and_splits(splits, tiles):
    rows = Latents([97, 5, 0, 210], WIDTHS[1], 20)
    got = attend_latents(rows.q, rows.pages, None, scale=0.3, softcap=2.0, splits=splits, tiles=tiles)
    close(got, exact(rows, scale=0.3, softcap=2.0))


@pytest.mark.parametrize("units", [1, 2, 12])
@pytest.mark.parametrize("size", [1, 16, 32])
@pytest.mark.parametrize("spaced", [True, False])
def test_lists(spaced, size, units):
    """Lists of a head, of some and of all; the last block is not full; a list may be empty."""
    rows = Latents([97, 5, 0, 333], WIDTHS[1], 12)
    lists, kept = rows.lists(units, size, spaced)
    close(attend_latents(rows.q, rows.pages, lists, scale=0.3), exact(rows, kept, scale=0.3))


@pytest.mark.parametrize("heads", [3, 16])
def test_some_rows_of_a_sequence_read_it_once(heads):
    """Drafts: each row sees one key more than the row before; a row that sees nothing gives zeros."""
    rows = Latents([97, 5, 64], WIDTHS[1], heads, each=3)
    limits = torch.tensor([95, 96, 97, 4, 5, 0, 62, 63, 64], dtype=torch.int32)
    close(attend_latents(rows.q, rows.pages, None, scale=0.3, limits=limits), exact(rows, limits=limits, scale=0.3))


def test_rows_in_host_memory():
    rows = Latents([97, 333], WIDTHS[1], 6)
    expected = exact(rows, scale=0.3)
    close(attend_latents(rows.q, rows.apart(), None, scale=0.3), expected)


def test_heads_are_cut_evenly():
    assert [share_of(count, 64) for count in (128, 40, 96, 67, 1)] == [64, 40, 48, 1, 1]
