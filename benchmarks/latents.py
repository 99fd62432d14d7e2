"""Decode over latents on a CPU, shaped as one layer of DeepSeek-V3's attention, beside reading them once.

    python benchmarks/latents.py --threads 16 --heads 128 64 32 16

Layers of random latents in order of their blocks, one after another, so that none stays in a cache: dense, and a
random share of the blocks of 32. Attention alone, no projections. Best and median of the rounds, of a layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from saccade.kv import KVFormat, KVStorage, KVView
from saccade.kv.paged import Paged
from saccade.ops import Call, cpu, run
from saccade.selection import Blocks, Dense, Selection, Shape

RANK, WIDTH, SIZE = 512, 576, 32
SCALE = 192**-0.5


def views(context: int, layers: int) -> list[KVView]:
    """Of ``layers`` pools of ``context`` random latents."""
    layout = KVFormat(torch.bfloat16, 1, WIDTH, SIZE, value_dim=RANK)
    made = []
    for _ in range(layers):
        storage = KVStorage(layout, layout.blocks(context))
        storage.k.normal_()
        table = torch.arange(storage.num_blocks, dtype=torch.int32)[None]
        made.append(KVView(Paged(storage.k, storage.v, table, context, layout)))
    return made


def timed(call: Callable[[KVView], object], stored: list[KVView], rounds: int) -> tuple[float, float]:
    """Best and median milliseconds of a layer."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        for one in stored:
            call(one)
        took.append((time.perf_counter() - began) / len(stored) * 1e3)
    return min(took), statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 64, 32, 16])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--share", type=float, default=0.05, help="of the blocks")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    n = asked.context
    stored = views(n, asked.layers)
    print(f"{cpu.isa()}, {asked.threads} threads, {n} latents; of a layer, best and median ms")

    def report(what: str, times: tuple[float, float], tokens: int, heads: int) -> None:
        best, median = times
        flops = 2 * tokens * heads * (WIDTH + RANK)
        products = f", {flops / best / 1e9:6.3f} TFLOP/s" if heads else ""
        print(f"{what:24} {best:8.3f} {median:8.3f}  {tokens * WIDTH * 2 / best / 1e6:6.1f} GB/s{products}")

    report("read (torch's amax)", timed(lambda v: v.paged().k.view(torch.int32).flatten().amax(), stored, 9), n, 0)
    for heads in asked.heads:
        q = torch.randn(heads, 1, WIDTH).bfloat16()
        shape = Shape.suffix(heads, 1, 1, n)
        take = max(1, int(asked.share * (n // SIZE)))
        some = torch.randperm(n // SIZE)[:take].sort().values
        rows: list[tuple[str, Selection, int]] = [
            ("dense", Dense(shape), n),
            (f"blocks({asked.share:g})", Blocks.from_lists(shape, SIZE, [some]), take * SIZE),
        ]
        for name, chosen, tokens in rows:

            def call(view: KVView, q: torch.Tensor = q, chosen: Selection = chosen) -> object:
                return run(Call(q, view, chosen, SCALE, None, asked.threads), "cpu")

            report(f"{name}, {heads} heads", timed(call, stored, asked.rounds), tokens, heads)


if __name__ == "__main__":
    main()
