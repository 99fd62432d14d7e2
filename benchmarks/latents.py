"""Decode over latents on a CPU, shaped as one layer of DeepSeek-V3's attention, beside reading them once.

    python benchmarks/latents.py --threads 16 --heads 128 64 32 16

Layers of random latents in order of their blocks, one after another, so that none stays in a cache: dense, and random
shares of the blocks of 32 and of the tokens. Attention alone, no projections. Best and median of the calls.

A latent of 576 channels meets ``heads`` x (576 + 512) products: ``--peak``, the GFLOP/s that a thread's core makes at
most, says how long these take, ``--read``, in GB/s, how long reading takes; ``limit`` is the longer of both. Where
others use the cores, calls should be shorter than a turn of the scheduler: ``--context 8192 --rounds 40``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from saccade.kv import KVFormat, KVStorage, KVView
from saccade.kv.paged import Paged
from saccade.kv.row_formats import AUTO, INT8, RowFormat
from saccade.ops import Call, cpu, run
from saccade.selection import Blocks, Dense, Selection, Shape, Tokens

RANK, WIDTH, SIZE = 512, 576, 32
SCALE = 192**-0.5


def views(context: int, layers: int, rows: RowFormat = AUTO) -> list[KVView]:
    """Of ``layers`` pools of ``context`` random latents."""
    layout = KVFormat(torch.bfloat16, 1, WIDTH, SIZE, rows, rows, value_dim=RANK)
    made = []
    for _ in range(layers):
        storage = KVStorage(layout, layout.blocks(context))
        table = torch.arange(storage.num_blocks, dtype=torch.int32)[None]
        view = KVView(Paged(storage.k, storage.v, table, context, layout))
        latents = torch.randn(1, context, WIDTH).bfloat16()
        view.write(0, latents, latents)
        made.append(view)
    return made


def timed(call: Callable[[KVView], object], stored: list[KVView], rounds: int) -> tuple[float, float]:
    """Best and median milliseconds of a call."""
    took = []
    for _ in range(rounds):
        for one in stored:
            began = time.perf_counter()
            call(one)
            took.append((time.perf_counter() - began) * 1e3)
    return min(took), statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 64, 32, 16])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--share", type=float, default=0.05, help="of the blocks, and of the tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--int8", action="store_true", help="latents in 8 bits")
    parser.add_argument("--torch", action="store_true", help="both products by torch.mm, too, without a softmax")
    parser.add_argument("--peak", type=float, help="GFLOP/s of a thread's core at most, in bfloat16")
    parser.add_argument("--read", type=float, help="GB/s that the threads read together; else as measured")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    n = asked.context
    stored = views(n, asked.layers, INT8 if asked.int8 else AUTO)
    print(f"{cpu.isa()}, {asked.threads} threads, {n} latents; of a layer, best and median ms")
    latent = stored[0].paged().k.stride(2) * stored[0].paged().k.element_size()

    def report(what: str, times: tuple[float, float], tokens: int, heads: int) -> None:
        best, median = times
        flops, size = 2 * tokens * heads * (WIDTH + RANK), tokens * latent
        products = f", {flops / best / 1e6:6.0f} GFLOP/s" if heads else ""
        if heads and asked.peak:
            limit = max(flops / asked.peak / asked.threads, size / rate) / 1e6
            products += f", limit {limit:.3f} ms: {limit / best:.2f} of it"
        print(f"{what:24} {best:8.3f} {median:8.3f}  {size / best / 1e6:6.1f} GB/s{products}", flush=True)

    read = timed(lambda v: v.paged().k.view(-1).view(torch.int32).amax(), stored, 9)
    rate = asked.read or n * latent / read[0] / 1e6
    report("read (torch's amax)", read, n, 0)
    for heads in asked.heads:
        q = torch.randn(heads, 1, WIDTH).bfloat16()
        shape = Shape.suffix(heads, 1, 1, n)
        take = max(1, int(asked.share * (n // SIZE)))
        some = torch.randperm(n // SIZE)[:take].sort().values
        lone = torch.randperm(n)[: take * SIZE]
        rows: list[tuple[str, Selection, int]] = [
            ("dense", Dense(shape), n),
            (f"blocks({asked.share:g})", Blocks.from_lists(shape, SIZE, [some]), take * SIZE),
            (f"tokens({asked.share:g})", Tokens.from_lists(shape, [lone]), take * SIZE),
        ]
        for name, chosen, tokens in rows:

            def call(view: KVView, q: torch.Tensor = q, chosen: Selection = chosen) -> object:
                return run(Call(q, view, chosen, SCALE, None, asked.threads), "cpu")

            report(f"{name}, {heads} heads", timed(call, stored, asked.rounds), tokens, heads)
        if asked.torch:

            def products(view: KVView, q: torch.Tensor = q[:, 0]) -> object:
                k = view.paged().k.view(-1, WIDTH)
                return (q @ k.T) @ k[:, :RANK]

            report(f"torch.mm, {heads} heads", timed(products, stored, asked.rounds), n, heads)


if __name__ == "__main__":
    main()
