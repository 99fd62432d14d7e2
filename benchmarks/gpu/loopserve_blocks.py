"""What the choice of ``loopserve(lines=block)`` spends its time on: sums of the sampled rows, their cover, the lists.

    python benchmarks/gpu/loopserve_blocks.py [--lengths 32768,131072] [--family topics] [--alpha 0.9] [--block-size 64]

bfloat16, 32 query and 8 KV heads of 128 by default, milliseconds by events on the device, medians; *whole*: the
method's call, the draw of its rows included.
"""

from __future__ import annotations

import argparse

import torch
from harness import time_ms

from saccade.bench.recall.families import generate
from saccade.kv.view import KVView
from saccade.methods import Chunk
from saccade.methods.loopserve import LoopServe
from saccade.methods.loopserve.triton_blocks import _listed, lists_on_lines
from saccade.methods.loopserve.triton_rounds import cover
from saccade.ops.triton.row_shares import sums


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--family", default="topics")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=0.9)
    parser.add_argument("--block-size", type=int, default=128)
    given = parser.parse_args()
    size = given.block_size
    method = LoopServe(alpha=given.alpha, lines="block", block_size=size)
    for length in (int(one) for one in given.lengths.split(",")):
        made = generate(given.family, given.heads, given.kv_heads, 128, length, torch.bfloat16, "cuda")
        chunk = Chunk.of(made.q, KVView.from_tensors(made.k, made.v))
        at = chunk.q, chunk.kv, chunk.shape
        listed = _listed(chunk.shape, method.sample(chunk).cpu(), size, chunk.q.device)
        weights = sums(*at, *listed, size, chunk.scale)
        copies = time_ms(lambda weights=weights: weights.clone())
        marks = cover(weights.clone(), listed[2], 0, given.alpha, LoopServe.window_blocks)
        took = {
            "sums": time_ms(lambda at=at, listed=listed, scale=chunk.scale: sums(*at, *listed, size, scale)),
            "cover": time_ms(
                lambda weights=weights, listed=listed: cover(
                    weights.clone(), listed[2], 0, given.alpha, LoopServe.window_blocks
                )
            )
            - copies,
            "lists": time_ms(lambda shape=chunk.shape, marks=marks: lists_on_lines(shape, size, marks)),
            "whole": time_ms(lambda chunk=chunk: method.select_prefill(chunk)),
        }
        columns, distances = (int(one.sum()) for one in marks)
        density = float(lists_on_lines(chunk.shape, size, marks).to("cpu").density())
        said = ", ".join(f"{name} {value:.3f}" for name, value in took.items())
        print(
            f"{length}: {said} ms; {listed[2].numel()} query blocks with rows, {columns / given.heads:.1f} columns and "
            f"{distances / given.heads:.1f} distances a head, density {density:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
