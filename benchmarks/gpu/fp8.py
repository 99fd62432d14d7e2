"""The products of an 8B layer in bfloat16 and in FP8 (``ops.fp8``), many rows and few, with the passes that quantize.

Few rows are timed in a recorded graph over several weights in turn, so that none is in the cache.
"""

from __future__ import annotations

from functools import partial

import torch
from harness import DTYPE, Results, graph_ms, time_ms
from torch.nn.functional import linear

from saccade.ops import fp8
from saccade.ops.fp8_weights import Fp8Matrix
from saccade.ops.triton import fp8 as passes
from saccade.ops.triton import rows as plain

SHAPES = {"query, key, value": (6144, 4096), "output": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
ROWS = 16384, 4096, 8, 1
COPIES = 5  # of weights, for few rows
MANY = 64


def products(results: Results, rows: int) -> None:
    total = {"bfloat16": 0.0, "fp8": 0.0}
    for name, (out, channels) in SHAPES.items():
        copies = 1 if rows > MANY else COPIES
        weights = [torch.randn(out, channels, device="cuda", dtype=DTYPE) / 64 for _ in range(copies)]
        matrices = [Fp8Matrix.of(weight) for weight in weights]
        x = torch.randn(rows, channels, device="cuda", dtype=DTYPE)
        quantized = fp8.quantize(x)
        calls = {
            "bfloat16": [partial(linear, x, weight) for weight in weights],
            "fp8": [partial(matrix.product, quantized) for matrix in matrices],
        }
        true = x[:64].double() @ weights[0].double().t()
        for kind, each in calls.items():
            ms = time_ms(each[0], 100) if rows > MANY else graph_ms(each, 50)
            total[kind] += ms
            size = out * channels * (2 if kind == "bfloat16" else 1)
            error = float((each[0]()[:64].double() - true).norm() / true.norm())
            results.add(
                rows=rows,
                product=name,
                kind=kind,
                us=1000 * ms,
                tflops=2e-9 * rows * out * channels / ms,
                gbps=1e-6 * size / ms,
                error=error,
            )
    results.add(rows=rows, product="all", gain=total["bfloat16"] / total["fp8"], **total)


def around(results: Results, rows: int) -> None:
    """The passes between products, plain and quantizing."""
    hidden, delta = torch.randn(2, rows, 4096, device="cuda", dtype=DTYPE)
    weight = torch.rand(4096, device="cuda", dtype=DTYPE)
    both = torch.randn(rows, 28672, device="cuda", dtype=DTYPE)
    gate, up = (part.contiguous() for part in both.chunk(2, -1))
    attended = torch.randn(rows, 32, 128, device="cuda", dtype=DTYPE).transpose(0, 1)
    calls = {
        "add and norm": (
            lambda: plain.add_norm(hidden, delta, weight, 1e-5),
            lambda: passes.add_norm(hidden, delta, weight, 1e-5),
        ),
        "gate": (lambda: plain.gated(gate, up), lambda: passes.gated(*both.chunk(2, -1))),
        "heads": (None, lambda: passes.heads(attended)),
    }
    for name, (before, after) in calls.items():
        us = None if before is None else 1000 * time_ms(before, 50)
        results.add(rows=rows, what=name, plain_us=us, quantizing_us=1000 * time_ms(after, 50))


def main() -> None:
    torch.manual_seed(0)
    results = Results("fp8")
    with torch.inference_mode():
        for rows in ROWS:
            products(results, rows)
        around(results, 16384)


if __name__ == "__main__":
    main()
