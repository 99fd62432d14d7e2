"""What the choice of ``sampled_rows`` spends its time on, kernel by kernel.

    python benchmarks/gpu/row_choosing.py [--cases] [--sweep]

One layer, bfloat16, 32 query and 8 KV heads of 128 by default. Each line: what, milliseconds of the method's call by
events on the device (median), its share of our dense kernel's, and every kernel's milliseconds by torch's profiler.
``--cases``: other groups, heads, samples and chunks, too. ``--sweep``: ways to launch the products.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import lru_cache

import torch
from harness import time_ms
from torch.profiler import ProfilerActivity, profile

from saccade.bench.recall.families import generate
from saccade.kv.view import KVView
from saccade.methods import Chunk
from saccade.methods.sampled_rows import SampledRows
from saccade.ops.triton import row_shares
from saccade.ops.triton.prefill import attend_prefill
from saccade.selection import Dense


generate = lru_cache(2)(generate)

TRIED = (  # sampled rows, key blocks, warps, stages, keys laid out first
    (128, 64, 8, 2, True), (128, 64, 8, 3, True), (128, 32, 8, 2, True), (128, 256, 8, 2, True), (256, 64, 16, 2, True),
    (256, 64, 16, 3, True), (256, 64, 8, 2, True), (64, 64, 4, 2, True), (64, 64, 4, 3, True), (192, 64, 8, 2, True),
    (128, 64, 4, 2, True), (128, 64, 8, 2, False),
)  # fmt: skip
TRIED_WIDE = (
    (32, 64, 4, 2, False), (64, 64, 4, 2, True), (64, 64, 8, 2, True), (128, 64, 8, 2, True), (128, 64, 8, 1, True),
)  # fmt: skip


def kernels(call) -> str:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    spent, count = Counter(), Counter()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("(")[0][-28:]
            spent[name] += event.time_range.elapsed_us() / 1000
            count[name] += 1
    return ", ".join(f"{name} {ms:.3f} ({count[name]})" for name, ms in spent.most_common(8))


def case(
    length: int,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    rows: int = 8,
    each: int = 0,
    family: str = "topics",
) -> None:
    """A prompt of ``length`` in one piece, or in chunks of ``each``."""
    made = generate(family, heads, kv_heads, dim, length, torch.bfloat16, "cuda")
    view = KVView.from_tensors(made.k, made.v, shuffle_seed=1)
    method, chunks = SampledRows(rows=rows), []
    for start in range(0, length, each or length):
        part = KVView.from_tensors(made.k[:, : start + each], made.v[:, : start + each]) if each else view
        chunks.append(Chunk.of(made.q[:, start : start + each] if each else made.q, part))
    called = lambda: [method.select_prefill(chunk) for chunk in chunks]  # noqa: E731
    choosing = time_ms(called, 200)
    whole = chunks[-1] if each else Chunk.of(made.q, view)
    dense = time_ms(
        lambda: attend_prefill(made.q, view, Dense(whole.shape if not each else _shape(made)), scale=whole.scale), 100
    )
    print(
        f"{family} {length} heads {heads}/{kv_heads} of {dim}, {rows} rows, {f'chunks of {each}' if each else 'one piece'}: "
        f"{choosing:.3f} ms, {100 * choosing / dense:.1f} % of dense ({dense:.1f}): {kernels(called)}",
        flush=True,
    )


def _shape(made):
    from saccade.selection import Shape

    return Shape.suffix(made.q.shape[0], made.k.shape[0], made.q.shape[1], made.k.shape[1])


def sweep(length: int, dim: int, heads: int, kv_heads: int, tried: tuple[tuple[int, int, int, int, bool], ...]) -> None:
    made = generate("topics", heads, kv_heads, dim, length, torch.bfloat16, "cuda")
    chunk = Chunk.of(made.q, KVView.from_tensors(made.k, made.v, shuffle_seed=1))
    for numbers in tried:
        config = row_shares.Config(*numbers)
        call = lambda config=config: row_shares._run(  # noqa: E731
            chunk.q, chunk.kv, chunk.shape, 8, 128, 0.8, 0.002, chunk.scale, None, False, config
        )
        try:
            print(f"  {length} of {dim}: {numbers}: {time_ms(call, 100):.3f} ms: {kernels(call)}", flush=True)
        except Exception as error:
            print(f"  {length} of {dim}: {numbers}: {type(error).__name__} {str(error)[:100]}", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), flush=True)
    for length in (131072, 32768):
        case(length)
    if given.cases:
        for options in (
            {"each": 8192}, {"each": 4096}, {"rows": 16}, {"dim": 256, "heads": 16, "kv_heads": 4},
            {"heads": 28, "kv_heads": 4}, {"heads": 24}, {"dim": 64},
        ):  # fmt: skip
            for length in (131072, 32768):
                try:
                    case(length, **options)
                except Exception as error:
                    print(f"{length} {options}: {type(error).__name__} {str(error)[:200]}", flush=True)
    if given.sweep:
        sweep(131072, 128, 32, 8, TRIED)
        sweep(32768, 256, 16, 4, TRIED_WIDE)
        sweep(32768, 64, 32, 8, TRIED[:2])
        sweep(32768, 128, 32, 8, TRIED[:4])


if __name__ == "__main__":
    main()
