"""Kernels of layers that keep a state at a model's shape, beside what they cannot do without: a step beside reading
and writing its states once, a prompt's rule and convolution beside the layer's matrix products.

    python benchmarks/gpu/keeping.py [--batches 1 8 32] [--tokens 4096] [--model 27b|4b|next] [--sweep]

Random values, bfloat16 rows, float32 states. Each call is one of a graph of as many layers as keep the caches cold.
``--sweep`` tries the launches' numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch

from saccade.ops.slots import NewRows, Slots
from saccade.ops.triton import causal_conv, delta_chunks, delta_rule

LAYERS = 24


class Shape(NamedTuple):
    """Of a gated delta layer: ``hidden`` channels in and out."""

    hidden: int
    key_heads: int
    heads: int
    d_k: int = 128
    d_v: int = 128
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.d_k + self.heads * self.d_v


SHAPES = {"27b": Shape(5120, 16, 48), "4b": Shape(2560, 16, 32), "next": Shape(2048, 16, 32)}


def micros(call: Callable[[int], None], calls: int = LAYERS) -> float:
    """Of one call in a graph of ``calls``, given their numbers: the median of 9 replays."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(number)
    times = []
    for _ in range(11):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / calls)
    return sorted(times[2:])[4]


def rows_of(shape: Shape, sequences: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """What a layer's convolution leaves: q, k, v as parts of one tensor, and the gates."""
    mixed = torch.randn(sequences, tokens, shape.channels, device="cuda", dtype=torch.bfloat16)
    keys = shape.key_heads * shape.d_k
    q, k, v = mixed.split([keys, keys, shape.heads * shape.d_v], -1)
    q, k = (one.view(sequences, tokens, shape.key_heads, shape.d_k) for one in (q, k))
    g = -torch.rand(sequences, tokens, shape.heads, device="cuda")
    beta = torch.rand(sequences, tokens, shape.heads, device="cuda", dtype=torch.bfloat16)
    return q, k, v.view(sequences, tokens, shape.heads, shape.d_v), g, beta


def steps(shape: Shape, batches: Sequence[int], sweep: bool) -> None:
    print("| batch | step, µs | reads and writes of its states, µs | ratio | convolution, µs |")
    print("|---|---|---|---|---|")
    for batch in batches:
        step_line(shape, batch, sweep)


def step_line(shape: Shape, batch: int, sweep: bool) -> None:
    pool = torch.randn(LAYERS, 2 * batch, shape.heads, shape.d_k, shape.d_v, device="cuda")
    order = torch.randperm(2 * batch, device="cuda")
    reads, writes = order[:batch].contiguous(), order[batch:].contiguous()
    inputs = rows_of(shape, batch, 1)

    def run(layer: int) -> None:
        delta_rule.step(*inputs, Slots(pool[layer], reads, writes), True)

    def moved(layer: int) -> None:
        pool[layer, batch:].copy_(pool[layer, :batch])

    def in_place(layer: int) -> None:
        pool[layer, :batch].mul_(1.0)

    convs = torch.zeros(LAYERS, 2 * batch, shape.channels, shape.taps, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(batch, shape.channels, 1, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(shape.channels, shape.taps, device="cuda", dtype=torch.bfloat16)

    def convolve(layer: int) -> None:
        causal_conv.convolve(NewRows(rows, Slots(convs[layer], reads, writes)), weight, None, True)

    floor = min(micros(moved), micros(in_place))
    ours = micros(run)
    print(f"| {batch} | {ours:.2f} | {floor:.2f} | {ours / floor:.2f} | {micros(convolve):.2f} |", flush=True)
    if sweep:
        kept = delta_rule.CHANNELS, delta_rule.WARPS
        found = {}
        for width, warps in product((8, 16, 32, 64), (1, 2, 4, 8)):
            delta_rule.CHANNELS, delta_rule.WARPS = width, warps
            try:
                found[width, warps] = micros(run)
            except Exception as error:
                print(f"  {width} {warps}: {type(error).__name__}")
        delta_rule.CHANNELS, delta_rule.WARPS = kept
        best = sorted(found.items(), key=lambda one: one[1])[:6]
        print("  best (channels, warps):", ", ".join(f"{a}: {b:.2f}" for a, b in best), flush=True)


def prompts(shape: Shape, tokens: int, sweep: bool) -> None:
    inputs = rows_of(shape, 1, tokens)
    pool = torch.zeros(1, shape.heads, shape.d_k, shape.d_v, device="cuda")
    slot = torch.zeros(1, dtype=torch.int64, device="cuda")
    slots = Slots(pool, slot, slot)
    hidden = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    value = shape.heads * shape.d_v
    into = torch.randn(shape.channels + value, shape.hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.randn(shape.hidden, value, device="cuda", dtype=torch.bfloat16)
    mixed = torch.randn(1, tokens, shape.channels, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    weight = torch.randn(shape.channels, shape.taps, device="cuda", dtype=torch.bfloat16)
    convs = Slots(torch.zeros(1, shape.channels, shape.taps, device="cuda", dtype=torch.bfloat16), slot, slot)

    def products(_: int) -> None:
        torch.nn.functional.linear(hidden, into)
        torch.nn.functional.linear(mixed.transpose(1, 2)[0, :, :value], out)

    def rule(_: int) -> None:
        delta_chunks.prompt(*inputs, slots, True)

    def convolve(_: int) -> None:
        causal_conv.convolve(NewRows(mixed, convs), weight, None, True)

    print("| tokens | rule, µs | convolution, µs | the layer's matrix products, µs |")
    print("|---|---|---|---|")
    print(f"| {tokens} | {micros(rule, 3):.1f} | {micros(convolve, 3):.1f} | {micros(products, 3):.1f} |", flush=True)
    if not sweep:
        return
    names = "WIDTH", "SYSTEM_WARPS", "SCAN_WARPS", "SCAN_STAGES"
    kept = [getattr(delta_chunks, name) for name in names]
    found = {}
    for numbers in product((32, 64), (4, 8), (4, 8), (2, 3)):
        for name, number in zip(names, numbers):
            setattr(delta_chunks, name, number)
        try:
            found[numbers] = micros(rule, 3)
        except Exception as error:
            print(f"  {numbers}: {type(error).__name__}: {str(error)[:80]}")
    for name, number in zip(names, kept):
        setattr(delta_chunks, name, number)
    best = sorted(found.items(), key=lambda one: one[1])
    print("  by", names, "; ".join(f"{a}: {b:.0f}" for a, b in best), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--model", choices=SHAPES, default="27b")
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    print(torch.cuda.get_device_name(), asked.model)
    with torch.inference_mode():
        steps(SHAPES[asked.model], asked.batches, asked.sweep)
        prompts(SHAPES[asked.model], asked.tokens, asked.sweep)


if __name__ == "__main__":
    main()
