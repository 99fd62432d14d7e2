"""What the choice of ``sampled_rows`` spends its time on, kernel by kernel.

    python benchmarks/gpu/row_choosing.py [--cases] [--sweep]

One layer, bfloat16, 32 query and 8 KV heads of 128. Each line: what, milliseconds of the method's call by events on the
device (median), which the host's start is part of, and of calls one behind the other, their shares of our dense
kernel's, and each kernel's milliseconds by torch's profiler. ``--cases``: other
groups and heads, and chunks, too. ``--sweep``: ways to launch the products.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from harness import time_ms
from torch.profiler import ProfilerActivity, profile

from saccade.bench.recall import families
from saccade.kv.view import KVView
from saccade.methods import Chunk
from saccade.methods.sampled_rows import SampledRows
from saccade.ops.triton import row_shares
from saccade.ops.triton.prefill import attend_prefill
from saccade.selection import Dense, Shape

generate = lru_cache(2)(families.generate)
LENGTHS = (131072, 32768)
# What is not the default, and the lengths it is tried at.
CASES: tuple[tuple[dict[str, int], tuple[int, ...]], ...] = (
    ({"dim": 64}, LENGTHS),
    ({"heads": 28, "kv_heads": 4}, LENGTHS),
    ({"heads": 24}, LENGTHS),
    ({"dim": 256, "heads": 16, "kv_heads": 4}, LENGTHS),
    ({"each": 4096}, (131072,)),
)
# Of heads of so many channels: sampled rows of a tile, key blocks of a program, warps, stages, keys laid out first.
TRIED = {
    (32768, 128): ((128, 32, 8, 2, True), (128, 16, 8, 2, True), (64, 32, 4, 3, True), (128, 64, 8, 2, True)),
    (32768, 64): (
        (128, 32, 8, 2, True), (64, 32, 4, 2, True), (64, 32, 4, 3, True), (64, 32, 4, 4, True),
        (128, 32, 8, 3, True), (64, 64, 4, 3, True),
    ),
    (32768, 256): (
        (32, 64, 4, 2, False), (128, 32, 8, 2, True), (64, 32, 4, 2, True), (64, 32, 8, 2, True), (64, 32, 4, 1, True),
        (64, 32, 4, 2, False),
    ),
    (131072, 64): ((128, 64, 8, 2, True), (64, 64, 4, 3, True)),
    (131072, 128): ((128, 64, 8, 2, True), (128, 32, 8, 2, True)),
}  # fmt: skip


def kernels(call: Callable[[], Any], most: int = 7) -> str:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name.split("(")[0].split("<")[0][-22:]] += event.time_range.elapsed_us() / 1000
    return ", ".join(f"{name} {ms:.3f}" for name, ms in spent.most_common(most))


def case(length: int, heads: int = 32, kv_heads: int = 8, dim: int = 128, each: int = 0) -> None:
    """A prompt of ``length`` in one piece, or in chunks of ``each``."""
    made = generate("topics", heads, kv_heads, dim, length, torch.bfloat16, "cuda")
    view, shape = KVView.from_tensors(made.k, made.v, shuffle_seed=1), Shape.suffix(heads, kv_heads, length, length)
    method, chunks = SampledRows(), []
    for start in range(0, length, each or length):
        end = start + (each or length)
        part = KVView.from_tensors(made.k[:, :end], made.v[:, :end]) if each else view
        chunks.append(Chunk.of(made.q[:, start:end], part))

    def choose() -> None:
        for chunk in chunks:
            method.select_prefill(chunk)

    choosing = time_ms(choose, 150)
    behind = time_ms(lambda: [choose() for _ in range(5)], 150) / 5
    dense = time_ms(lambda: attend_prefill(made.q, view, Dense(shape), scale=chunks[0].scale), 100)
    print(
        f"{length}, {heads}/{kv_heads} heads of {dim}{f', chunks of {each}' if each else ''}: {choosing:.3f} ms, "
        f"{behind:.3f} behind another, {100 * choosing / dense:.1f} and {100 * behind / dense:.1f} % of dense "
        f"({dense:.1f}): {kernels(choose)}",
        flush=True,
    )


def sweep(length: int, dim: int, tried: tuple[tuple[int, int, int, int, bool], ...]) -> None:
    heads, kv_heads = (16, 4) if dim > 128 else (32, 8)
    made = generate("topics", heads, kv_heads, dim, length, torch.bfloat16, "cuda")
    chunk = Chunk.of(made.q, KVView.from_tensors(made.k, made.v, shuffle_seed=1))
    for numbers in tried:
        config = row_shares.Config(*numbers)

        def call(config: row_shares.Config = config) -> Any:
            at = chunk.q, chunk.kv, chunk.shape, 8, 128, 0.8, 0.002, 2, chunk.scale, None, False
            return row_shares._run(*at, config)

        said = attempt(lambda call=call: f"{time_ms(call, 100):.3f} ms: {kernels(call, 1)}")
        print(f"  {length} of {dim}: {numbers}: {said}", flush=True)


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # more shared memory than there is, say
        return f"{type(error).__name__}: {str(error)[:100]}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), flush=True)
    for length in LENGTHS:
        case(length)
    for options, lengths in CASES if given.cases else ():
        for length in lengths:
            failed = attempt(lambda length=length, options=options: case(length, **options))
            if failed:
                print(length, options, failed, flush=True)
    for (length, dim), tried in TRIED.items() if given.sweep else ():
        sweep(length, dim, tried)


if __name__ == "__main__":
    main()
