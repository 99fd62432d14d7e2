"""One product of a few rows with weights in planes, beside bfloat16's and the rate at which memory is read.

    python benchmarks/weight_planes.py [--threads 2] [--formats Q4_0,Q4_K,Q6_K,Q8_0] [--rows 1,4,16] [--rounds 5]

Microseconds of a product and GB/s of its weights, for 4,096 x 4,096 and 896 x 4,864 (the down projection of a 0.5B
model), each over copies of a matrix that fill 512 MB, so that none is in the caches. `bfloat16` is the same call with
plain weights, `torch` is torch's product. The best of several rounds, in which formats take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from saccade.bench.limits import READ_BYTES
from saccade.machine import ask_for_huge_pages
from saccade.ops import cpu
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.matrices import DenseMatrix, Matrix
from saccade.ops.planes import FORMATS, GROUP

SHAPES = ((4096, 4096), (896, 4864))  # outputs, channels
BYTES = 512 << 20  # of copies of one matrix


def copies(name: str, outputs: int, channels: int) -> list[Matrix]:
    """Matrices of random bytes: what a product takes does not hang on what they are."""
    kind = FORMATS.get(name)
    if kind is None:
        size = 2 * outputs * channels
        stored = [torch.randn(outputs, channels).bfloat16() for _ in range(max(1, BYTES // size))]
        return [DenseMatrix(one) for one in stored]
    groups, width = outputs // GROUP, native.plane_group_bytes(kind.number, channels)
    made = []
    for _ in range(max(1, BYTES // (groups * width))):
        weight = torch.empty(groups, width, dtype=torch.uint8)
        ask_for_huge_pages(weight)
        made.append(kind(weight.random_(0, 60), outputs))  # scales that are finite
    return made


def product(matrix: Matrix, x: torch.Tensor, threads: int) -> None:
    out = torch.empty(x.shape[0], matrix.outputs, dtype=x.dtype)
    cpu.kernels().product_rows(
        native.ProductRows(
            threads=threads,
            storage=STORAGE[x.dtype],
            rows=x.shape[0],
            channels=matrix.channels,
            x=address(x),
            matrix=matrix.native(x.dtype),
            out=address(out),
        )
    )


def seconds(call: Callable[[Matrix], object], matrices: list[Matrix]) -> float:
    began = time.perf_counter()
    for matrix in matrices:
        call(matrix)
    return (time.perf_counter() - began) / len(matrices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads)
    rows = [int(one) for one in options.rows.split(",")]
    data = torch.empty(READ_BYTES // 8, dtype=torch.int64)
    ask_for_huge_pages(data)
    data.fill_(1)
    cpu.read_pass(data, options.threads)
    reading = 9e9
    for _ in range(options.rounds):
        began = time.perf_counter()
        cpu.read_pass(data, options.threads)
        reading = min(reading, time.perf_counter() - began)
    print(f"{cpu.isa()}, {options.threads} threads, reading {READ_BYTES / reading / 1e9:.1f} GB/s\n")
    print("| outputs x channels | weights |" + "".join(f" {count} rows, us | GB/s |" for count in rows))
    print("|---|---|" + "---:|---:|" * len(rows))
    for outputs, channels in SHAPES:
        held = {name: copies(name, outputs, channels) for name in ["bfloat16", *options.formats.split(",")]}
        inputs = [torch.randn(count, channels).bfloat16() for count in rows]
        best: dict[tuple[str, int], float] = {}
        for _ in range(options.rounds):
            for name, matrices in [("torch", held["bfloat16"]), *held.items()]:
                for x in inputs:

                    def call(matrix: Matrix, x: torch.Tensor = x, name: str = name) -> None:
                        if name == "torch":
                            matrix.product(x)
                        else:
                            product(matrix, x, options.threads)

                    key = name, x.shape[0]
                    best[key] = min(best.get(key, 9e9), seconds(call, matrices))
        for name in ("torch", *held):
            size = held["bfloat16" if name == "torch" else name][0].nbytes
            cells = "".join(
                f" {best[name, count] * 1e6:.0f} | {size / best[name, count] / 1e9:.1f} |" for count in rows
            )
            print(f"| {outputs} x {channels} | {name} |{cells}", flush=True)


if __name__ == "__main__":
    main()
