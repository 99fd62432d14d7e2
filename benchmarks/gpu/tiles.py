"""The products of an 8B layer and its head with weights in tiles (``ops.tile_weights``) beside bfloat16's, in recorded
graphs over several weights in turn, so that none is in the cache: python benchmarks/gpu/tiles.py [--sweep]

``--sweep`` times one format with other launches than tile_products has, for who ports it to another GPU.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product as every

import torch
from harness import DTYPE, Results, graph_ms, time_ms
from random_blocks import random_blocks

from saccade.ops.matrices import DenseMatrix, Matrix
from saccade.ops.tile_weights import TileMatrix
from saccade.ops.triton import products, tile_products, tile_rows

SHAPES = {"query, key, value": (6144, 4096), "output": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
HEAD = {"head": (128256, 4096)}
SHOWN = "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"
ROWS = 1, 8, 32, 4096
COPIES = 5  # of weights, for few rows
REPEATS = 30


def drawn(name: str, outputs: int, channels: int) -> TileMatrix:
    """Random blocks, in tiles."""
    return TileMatrix.of_weights(random_blocks(name, outputs, channels))


def timed(matrices: list[Matrix], x: torch.Tensor) -> float:
    """Milliseconds of a product."""
    if len(x) > tile_products.MOST_ROWS:
        return time_ms(partial(matrices[0].product, x), 20)
    of = products.product if isinstance(matrices[0], DenseMatrix) else lambda x, matrix: matrix.product(x)
    return graph_ms([partial(of, x, matrix) for matrix in matrices], REPEATS)


def compare(results: Results, rows: int) -> None:
    total: dict[str, float] = {}
    for name, (outputs, channels) in {**SHAPES, **HEAD}.items():
        x = torch.randn(rows, channels, device="cuda", dtype=DTYPE)
        for kind in ("bfloat16", *SHOWN):
            count = COPIES if rows <= tile_products.MOST_ROWS and name != "head" else 1
            plain = kind == "bfloat16"
            held: list[Matrix] = [
                DenseMatrix(torch.randn(outputs, channels, device="cuda", dtype=DTYPE))
                if plain
                else drawn(kind, outputs, channels)
                for _ in range(count)
            ]
            ms = timed(held, x)
            total[kind] = total.get(kind, 0.0) + ms * (1 if name == "head" else 32)
            results.add(rows=rows, product=name, kind=kind, us=1000 * ms, gbps=1e-6 * held[0].nbytes / ms)
            del held
    results.add(rows=rows, product="32 layers and the head, ms", **total)
    results.add(rows=rows, product="times bfloat16's", **{kind: total["bfloat16"] / ms for kind, ms in total.items()})


def sweep(results: Results, name: str) -> None:
    for shape, (outputs, channels) in {**SHAPES, **HEAD}.items():
        matrices: list[Matrix] = [drawn(name, outputs, channels) for _ in range(1 if shape in HEAD else COPIES)]
        for rows, warps, programs, fewest, registers in every((1, 8, 32), (1, 2, 4), (8, 16), (2, 4), (0, 128)):
            if registers and rows > 8:
                continue
            tile_rows.LAUNCH = tile_rows.Launch(warps, programs, fewest, 8, registers)
            launch = tile_rows.LAUNCH._asdict()
            x = torch.randn(rows, channels, device="cuda", dtype=DTYPE)
            ms = results.attempt(f"{shape} {launch}", partial(timed, matrices, x))
            if ms is not None:
                results.add(rows=rows, product=shape, **launch, us=1000 * ms, gbps=1e-6 * matrices[0].nbytes / ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", choices=SHOWN, help="time other launches of this format")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    args = parser.parse_args()
    torch.manual_seed(0)
    results = Results("tiles")
    with torch.inference_mode():
        if args.sweep:
            sweep(results, args.sweep)
        else:
            for rows in args.rows:
                compare(results, rows)


if __name__ == "__main__":
    main()
