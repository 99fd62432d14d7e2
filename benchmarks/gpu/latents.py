"""Attention over latents on a GPU, shaped as DeepSeek-V3's: 128 heads, rows of 512 + 64 channels, 8 layers.

    python benchmarks/gpu/latents.py [--heads 128] [--context 65536] [--batch 8] [--sweep]

Each layer has latents of its own, in scattered pages, and all layers are in one graph: the store of a new row, what a
method does to choose, attention. ``floor``: the latents (or the chosen ones, and the summaries) read once, at the rate
of a kernel that only reads. Projections are not part of it.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from harness import DTYPE, Results, graph_ms, say, time_ms

from saccade.ops.triton import batched_choice
from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_decode import Summaries, append_rows, score_blocks
from saccade.ops.triton.latents import Tiles, attend_latents, tiles_for
from saccade.selection.forms import Summarized
from saccade.selection.readings import Choice

LAYERS, VALUES, WIDTH, PAGE = 8, 512, 576, 32


class Layer:
    """A batch's latents of one layer, summaries of their blocks, queries and a new row."""

    def __init__(self, batch: int, context: int, heads: int, size: int) -> None:
        slots = batch * context // PAGE
        self.pool = torch.randn(slots, 1, PAGE, WIDTH, device="cuda", dtype=DTYPE)
        tables = torch.randperm(slots, device="cuda").int().view(batch, 1, -1)
        lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.pages = Pages(self.pool, self.pool, tables, lengths, context, value_dim=VALUES)
        self.bounds = torch.randn(batch, context // size, 2, 1, WIDTH, device="cuda", dtype=DTYPE)
        pointers = torch.tensor([one.data_ptr() for one in self.bounds], device="cuda")
        self.summaries = Summaries(pointers, size, "cuboid")
        self.q = torch.randn(batch, heads, WIDTH, device="cuda", dtype=DTYPE)
        self.new = torch.randn(batch, 1, WIDTH, device="cuda", dtype=DTYPE)


def dense(layer: Layer, **options) -> None:
    append_rows(layer.new, layer.new, layer.pages)
    attend_latents(layer.q, layer.pages, None, scale=0.05, **options)


def chosen(layer: Layer, choice: Choice, take, upto, only: str = "", **options) -> None:
    append_rows(layer.new, layer.new, layer.pages, layer.summaries)
    if only == "append":
        return
    scores = score_blocks(layer.q, layer.pages, layer.summaries, choice)
    if only == "score":
        return
    lists = batched_choice.choose_blocks(scores, layer.pages, choice, take, upto)
    if only == "choose":
        return
    attend_latents(layer.q, layer.pages, lists, scale=0.05, **options)


def reading_gbps(layers: list[Layer]) -> float:
    """Of a sum over the latents."""
    took = time_ms(lambda: [layer.pool.view(torch.float32).sum() for layer in layers])
    return sum(layer.pool.numel() * layer.pool.element_size() for layer in layers) / took / 1e6


def tried(results: Results, floor: float, calls, **row) -> None:
    took = results.attempt(str(row), lambda: graph_ms(calls))
    if took is not None:
        results.add(**row, ms=took, floors=took / floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[128])
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=32, help="keys of a block")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--few", action="store_true", help="Triton's tile of 64 heads and some splits as well")
    parser.add_argument("--sweep", action="store_true", help="other tiles and splits as well")
    given = parser.parse_args()
    results = Results("latents")
    layers = [Layer(given.batch, given.context, max(given.heads), given.size) for _ in range(LAYERS)]
    rate = reading_gbps(layers)
    bytes_all = given.batch * given.context * WIDTH * 2
    floor = bytes_all / rate / 1e6
    results.facts = {"device": torch.cuda.get_device_name(), "reading_gbps": rate, "floor_ms": floor}
    say(f"{torch.cuda.get_device_name()}: {rate:.0f} GB/s, latents of a layer in {floor:.3f} ms")
    for heads in given.heads:
        for layer in layers:
            layer.q = layer.q[:, :heads].contiguous()
        plans = [tiles_for(heads, layers[0].q, VALUES)]
        if given.few:
            plans.append(Tiles(64, 64, 8, 2, 1))
        if given.sweep:
            plans += [
                Tiles(64, 64, 8, 2, 1), Tiles(64, 32, 8, 3, 1), Tiles(64, 32, 8, 2, 1), Tiles(32, 32, 4, 3, 2),
                Tiles(32, 32, 8, 3, 2), Tiles(32, 64, 8, 2, 2), Tiles(16, 32, 4, 3, 2), Tiles(16, 64, 4, 2, 2),
                Tiles(16, 32, 8, 3, 2), Tiles(16, 64, 8, 2, 2),
            ]  # fmt: skip
        plans = [plan for plan in dict.fromkeys(plans) if plan.heads < 2 * heads]
        for tiles in plans:
            calls = [partial(dense, layer, tiles=tiles) for layer in layers]
            tried(results, floor, calls, method="dense", heads=heads, tiles=str(tuple(tiles)))
        if given.sweep:
            for splits in (4, 8, 12, 16, 24, 32):
                calls = [partial(dense, layer, splits=splits) for layer in layers]
                tried(results, floor, calls, method="dense", heads=heads, splits=splits)
        take = int(given.share * given.context / given.size)
        choice = Choice(Summarized(given.size, "cuboid"), 1, 1, 1, 4 * take * given.size, take=take)
        takes = torch.full((given.batch,), take, dtype=torch.int32, device="cuda")
        upto = torch.zeros_like(takes)
        less = given.batch * (take * given.size + 2 * given.context // given.size) * WIDTH * 2 / rate / 1e6
        for only in ("append", "score", "choose", ""):
            calls = [partial(chosen, layer, choice, takes, upto, only) for layer in layers]
            tried(results, less, calls, method="arkvale", heads=heads, until=only or "attention")
        for splits in (2, 4, 8, 16) if given.sweep or given.few else ():
            calls = [partial(chosen, layer, choice, takes, upto, splits=splits) for layer in layers]
            tried(results, less, calls, method="arkvale", heads=heads, splits=splits)
        for tiles in plans[1:]:
            calls = [partial(chosen, layer, choice, takes, upto, tiles=tiles) for layer in layers]
            tried(results, less, calls, method="arkvale", heads=heads, tiles=str(tuple(tiles)))


if __name__ == "__main__":
    main()
