"""The kernels of decode over latents on a GPU against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import BOUND, random_blocks
from helpers import brute_force
from latent_helpers import Latents, exact

from saccade.kv import KVFormat, KVStorage
from saccade.kv.paged import Paged
from saccade.kv.summaries import summarize
from saccade.kv.view import KVView
from saccade.ops.movers import row_mover
from saccade.ops.triton import latents_wide
from saccade.ops.triton.batched_decode import Summaries, append_rows, score_blocks
from saccade.ops.triton.latents import Tiles, attend_latents, tiles_for
from saccade.ops.triton.prefill import Config, attend_prefill
from saccade.selection import Band, Dense, Shape
from saccade.selection.forms import Summarized
from saccade.selection.readings import Choice

DEEPSEEK = (512, 64)
PLAIN = Tiles(64, 64, 8, 2, 1)


def agrees(rows, kept=None, limits=None, lists=None, pages=None, tiles=None, splits=None, softcap=None):
    options = {"scale": 0.06, "softcap": softcap}
    for _ in range(2):  # the second takes memory that the first wrote
        out, lse = attend_latents(
            rows.q, pages or rows.pages, lists, limits=limits, tiles=tiles, splits=splits, **options
        )
    for row, (expected, expected_lse) in enumerate(exact(rows, kept, limits, **options)):
        got = out[row, :, : rows.value_dim].double().cpu()
        assert torch.isfinite(got).all()
        assert float((got - expected).norm()) <= BOUND[rows.q.dtype] * max(float(expected.norm()), 1e-30)
        torch.testing.assert_close(lse[row].double().cpu(), expected_lse, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(("heads", "dtype"), [
    (16, torch.bfloat16), (32, torch.bfloat16), (40, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16),
    (20, torch.float32),
])  # fmt: skip
def test_all_keys_of_unequal_rows(heads, dtype):
    agrees(Latents([1, 0, 4001, 640, 63], DEEPSEEK, heads, dtype, device="cuda", page=32))


@pytest.mark.parametrize("widths", [(128, 32), (32, 8), (256, 64)])
def test_other_widths(widths):
    agrees(Latents([1, 0, 1001], widths, 24, torch.bfloat16, device="cuda"))


def test_many_heads_go_to_warpgroups():
    rows = Latents([40], DEEPSEEK, 128, torch.bfloat16, device="cuda")
    assert tiles_for(128, rows.q, 512).wide == (torch.cuda.get_device_capability()[0] == 9)


@pytest.mark.parametrize("tiles", [None, PLAIN])
@pytest.mark.parametrize("splits", [1, 2, 7, 128])
def test_splits(splits, tiles):
    rows = Latents([4001, 0, 97, 5000], DEEPSEEK, 128, torch.bfloat16, device="cuda", page=64)
    agrees(rows, splits=splits, tiles=tiles)
    agrees(rows, splits=splits, tiles=tiles, softcap=3.0)


@pytest.mark.parametrize("tiles", [None, PLAIN])
@pytest.mark.parametrize(("units", "size", "spaced"), [(1, 32, True), (1, 1, False), (2, 16, True), (128, 1, True)])
def test_lists(units, size, spaced, tiles):
    rows = Latents([97, 5, 0, 4001], DEEPSEEK, 128, torch.bfloat16, device="cuda", page=32)
    lists, kept = rows.lists(units, size, spaced)
    agrees(rows, kept, lists=lists, tiles=tiles)


@pytest.mark.parametrize("tiles", [None, PLAIN])
@pytest.mark.parametrize("heads", [16, 64])
def test_some_rows_of_a_sequence_read_it_once(heads, tiles):
    rows = Latents([97, 5, 2000], DEEPSEEK, heads, torch.bfloat16, each=3, device="cuda")
    limits = torch.tensor([95, 96, 97, 4, 5, 0, 1998, 1999, 2000], dtype=torch.int32, device="cuda")
    agrees(rows, limits=limits, tiles=tiles)


@pytest.mark.parametrize("heads", [16, 128])
def test_rows_in_other_memory(heads):
    rows = Latents([97, 3330], DEEPSEEK, heads, torch.bfloat16, device="cuda")
    agrees(rows, pages=rows.apart())


@pytest.mark.parametrize("heads", [16, 128])
def test_queries_that_lie_anywhere(heads):
    rows = Latents([97, 333], DEEPSEEK, heads, torch.bfloat16, device="cuda", page=32)
    room = torch.empty(rows.q.numel() + 1, dtype=torch.bfloat16, device="cuda")
    room[1:] = rows.q.flatten()
    rows.q = room[1:].view(rows.q.shape)
    agrees(rows)


@pytest.mark.parametrize("heads", [16, 128])
def test_calls_in_a_graph_wait_for_each_other(heads):
    """Queries of a call come of the call before."""
    rows = Latents([4001, 300], DEEPSEEK, heads, torch.bfloat16, device="cuda", page=32)

    def chain():
        q, outs = rows.q, []
        for _ in range(8):
            out, _ = attend_latents(q, rows.pages, None, scale=0.3)
            q = torch.cat([out[..., :512], rows.q[..., 512:]], -1)
            outs.append(out[..., :512].clone())
        return torch.stack(outs)

    first = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    for _ in range(10):
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, first)
        assert torch.equal(chain(), first)


@pytest.mark.parametrize(("kind", "size"), [("cuboid", 32), ("minmax", 16), ("cuboid", 128)])
def test_blocks_are_summarized_and_scored(kind, size):
    rows = Latents([4096, 0, 333, 2048], DEEPSEEK, 128, torch.bfloat16, device="cuda")
    full = [own[: len(own) // size * size].view(1, -1, size, 576) for own in rows.rows]
    kept = [summarize(own.cuda(), kind).permute(2, 0, 1, 3).bfloat16() for own in full]
    made = [one.clone(memory_format=torch.contiguous_format) for one in kept]
    summaries = Summaries(torch.tensor([one.data_ptr() for one in made], device="cuda"), size, kind)
    for length, one in zip(rows.lengths, made):
        if length and length % size == 0:
            one[-1] = torch.nan
    new = torch.stack([own[-1:] if len(own) else torch.zeros(1, 576) for own in rows.rows]).bfloat16().cuda()
    append_rows(new, new, rows.pages, summaries)
    scores = score_blocks(rows.q, rows.pages, summaries, Choice(Summarized(size, kind), 1, 1, 0, 9 * size, take=2))
    for row, (length, want, one) in enumerate(zip(rows.lengths, kept, made)):
        blocks = length // size
        torch.testing.assert_close(one, want, atol=2e-2, rtol=1e-2)
        high, low, q = one[:, 0, 0].double(), one[:, 1, 0].double(), rows.q[row].double()
        expected = (q.clamp(min=0) @ high.T + q.clamp(max=0) @ low.T).mean(0)
        torch.testing.assert_close(scores[row, 0, 1:blocks].double(), expected[1:], atol=1e-3, rtol=1e-4)
        assert (scores[row, 0, -(-length // size) :] == -torch.inf).all()


@pytest.mark.parametrize("copy", [None, False])
@pytest.mark.parametrize("kind", ["dense", "band", "blocks"])
@pytest.mark.parametrize(("width", "values"), [(192, 128), (80, 48)])
def test_prefills_of_keys_longer_than_values(width, values, kind, copy):
    """Three chunks of a prompt, of which the last is no multiple of a tile."""
    rng = torch.Generator().manual_seed(4)
    k, v = torch.randn(2, 4, 3001, width, generator=rng).to("cuda", torch.bfloat16)
    v[..., values:] = 0
    layout = KVFormat(torch.bfloat16, 4, width, 32, filled=values)
    storage = KVStorage(layout, layout.blocks(3001) + 2, "cuda", row_mover(torch.device("cuda")))
    table = torch.randperm(storage.num_blocks, device="cuda", dtype=torch.int32)[None]
    view = KVView(Paged(storage.k, storage.v, table, 3001, layout), mover=storage.mover)
    view.write(0, k, v)
    for start, stop in ((0, 700), (700, 2900), (2900, 3001)):
        q = torch.randn(4, stop - start, width, generator=rng).to("cuda", torch.bfloat16)
        shape, here = Shape.suffix(4, 4, stop - start, stop), view.upto(stop)
        selection = {
            "dense": Dense(shape), "band": Band(shape, window=300, sinks=5), "blocks": random_blocks(shape, 128, 4)
        }[kind]  # fmt: skip
        config = None if copy is None else Config(128, 64, 8, 2, copy=copy)
        out, lse = attend_prefill(q, here, selection.to("cuda"), scale=0.1, config=config)
        expected, expected_lse = brute_force(q.cpu(), k[:, :stop].cpu(), v[:, :stop].cpu(), selection.mask(), scale=0.1)
        error = (out.cpu().double() - expected)[..., :values].norm() / expected.norm()
        assert float(error) < BOUND[torch.bfloat16]
        torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("width", [576, 192])
def test_rows_are_stored_and_gathered(width):
    layout = KVFormat(torch.bfloat16, 1, width, 32, value_dim=128)
    storage = KVStorage(layout, 9, "cuda", row_mover(torch.device("cuda")))
    table = torch.randperm(9, device="cuda", dtype=torch.int32)[None]
    view = KVView(Paged(storage.k, storage.v, table, 250, layout), mover=storage.mover)
    k = torch.randn(1, 250, width, device="cuda", dtype=torch.bfloat16)
    view.write(0, k[:, :77], k[:, :77])
    view.write(77, k[:, 77:], k[:, 77:])
    assert torch.equal(view.keys(), k)
    assert torch.equal(view.values(30, 200), k[:, 30:200])


def test_the_kernel_for_many_heads_is_there():
    assert latents_wide.gluon is not None
