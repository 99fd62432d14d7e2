"""The kernels of decode over latents against float64, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from latent_helpers import WIDTHS, Latents, exact

from saccade.kv import KVFormat, KVStorage
from saccade.kv.paged import Paged
from saccade.kv.summaries import summarize
from saccade.kv.view import KVView
from saccade.ops import attend
from saccade.ops.triton.batched_decode import Summaries, append_rows, score_blocks
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.latents import Tiles, attend_latents, share_of
from saccade.ops.triton.prefill import Config, attend_prefill, rest_of
from saccade.selection import Band, Blocks, Dense, Shape
from saccade.selection.forms import Summarized
from saccade.selection.readings import Choice

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


def test_one_row_of_each_sequence_reads_as_many_keys_as_it_may():
    """Of more heads than a group of rows has room for."""
    rows, limits = Latents([97, 5, 64], WIDTHS[1], 6), torch.tensor([40, 0, 64], dtype=torch.int32)
    got = attend_decode(rows.q, rows.pages, None, scale=0.3, limits=limits)
    close(got, exact(rows, limits=limits, scale=0.3))


def test_rows_in_host_memory():
    rows = Latents([97, 333], WIDTHS[1], 6)
    expected = exact(rows, scale=0.3)
    close(attend_latents(rows.q, rows.apart(), None, scale=0.3), expected)


def test_heads_are_cut_evenly():
    assert [share_of(count, 64) for count in (128, 40, 96, 67, 1)] == [64, 40, 48, 1, 1]


@pytest.mark.parametrize(("kind", "size"), [("cuboid", 32), ("minmax", 16)])
@pytest.mark.parametrize("widths", [(64, 16), (256, 24)])
def test_new_rows_are_stored_once_and_their_blocks_summarized(widths, kind, size):
    """Rows of 280 channels are summarized in parts."""
    rows = Latents([64, 0, 65, 32, 1], widths, 4)
    before = rows.pages.k.clone()
    buffers = [torch.full((4, 2, 1, sum(widths)), -7.0) for _ in rows.lengths]
    summaries = Summaries(torch.tensor([buffer.data_ptr() for buffer in buffers]), size, kind)
    new = torch.randn(1, 5, sum(widths)).transpose(0, 1)
    append_rows(new, new, rows.pages, summaries)
    for row, length in enumerate(rows.lengths):
        if length:
            slot, at = rows.pages.tables[row, 0, (length - 1) // 16], (length - 1) % 16
            assert torch.equal(rows.pages.k[slot, 0, at], new[row, 0])
            before[slot, 0, at] = new[row, 0]
            rows.rows[row][length - 1] = new[row, 0]
        if length and length % size == 0:
            block = length // size - 1
            expected = summarize(rows.rows[row][-size:].view(1, 1, size, -1), kind)[:, 0, 0]
            torch.testing.assert_close(buffers[row][block, :, 0], expected, atol=1e-6, rtol=1e-6)
            buffers[row][block] = -7.0
        assert (buffers[row] == -7.0).all()
    assert torch.equal(rows.pages.k.nan_to_num(9e9), before.nan_to_num(9e9))


@pytest.mark.parametrize("heads", [1, 6, 16])
@pytest.mark.parametrize(("kind", "size"), [("cuboid", 32), ("minmax", 16)])
def test_scores_of_blocks_are_means_over_all_heads(kind, size, heads):
    rows = Latents([700, 0, 320, 65], (200, 24), heads)
    made = [
        summarize(own[: len(own) // size * size].view(1, -1, size, 224), kind).permute(2, 0, 1, 3).contiguous()
        for own in rows.rows
    ]
    summaries = Summaries(torch.tensor([one.data_ptr() for one in made]), size, kind)
    choice = Choice(Summarized(size, kind), 1, 1, 2, 6 * size, take=2)
    scores = score_blocks(rows.q, rows.pages, summaries, choice)
    assert scores.shape == (4, 1, -(-700 // size))
    for row, length in enumerate(rows.lengths):
        stop = max(-(-length // size) - 2, 0)
        high, low = (made[row][:stop, part, 0].double() for part in (0, 1))
        q = rows.q[row].double()
        expected = (q.clamp(min=0) @ high.T + q.clamp(max=0) @ low.T).mean(0)
        torch.testing.assert_close(scores[row, 0, 1:stop].double(), expected[1:], atol=1e-4, rtol=1e-5)
        assert (scores[row, 0, max(stop, 1) :] == -torch.inf).all()
        assert scores[row, 0, 0] == -torch.inf


def filled_view(heads, length, width, values, dtype=torch.float32):
    """Keys of ``width`` channels, and values whose last channels are zeros, in scattered pages."""
    rng = torch.Generator().manual_seed(4)
    layout = KVFormat(dtype, heads, width, 32, filled=values)
    storage = KVStorage(layout, layout.blocks(length) + 2, "cpu")
    table = torch.randperm(storage.num_blocks, generator=rng, dtype=torch.int32)[None]
    view = KVView(Paged(storage.k, storage.v, table, length, layout))
    k, v = torch.randn(2, heads, length, width, generator=rng).to(dtype)
    v[..., values:] = 0
    view.write(0, k, v)
    return view


@pytest.mark.parametrize("config", [None, Config(64, 32, 4, 2), Config(64, 32, 4, 2, copy=True)])
@pytest.mark.parametrize("kind", ["dense", "band", "blocks"])
@pytest.mark.parametrize(("width", "values"), [(48, 32), (32, 16), (96, 64), (48, 48)])
def test_prefills_of_keys_longer_than_values(width, values, kind, config):
    view = filled_view(4, 300, width, values)
    q = torch.randn(4, 200, width, generator=torch.Generator().manual_seed(5))
    shape = Shape.suffix(4, 4, 200, 300)
    if kind == "band":
        selection = Band(shape, window=70, sinks=5)
    elif kind == "blocks":
        taken = torch.rand(4, 4, 5, generator=torch.Generator().manual_seed(6)) < 0.4
        taken[:, torch.arange(4), torch.arange(4) + 1] = True
        selection = Blocks.from_block_mask(shape, 64, taken)
    else:
        selection = Dense(shape)
    out, lse = attend_prefill(q, view, selection, scale=0.2, config=config)
    expected, expected_lse = attend(q, view, selection, scale=0.2, backend="reference")
    torch.testing.assert_close(out[..., :values], expected[..., :values], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_keys_are_cut_into_two_powers_of_two():
    assert [rest_of(width) for width in (192, 96, 48, 128, 224, 24)] == [64, 32, 16, 0, 0, 0]
