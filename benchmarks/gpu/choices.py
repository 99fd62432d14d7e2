"""The ways to list the best blocks of many rows, timed against each other: python benchmarks/gpu/choices.py

A row is one size: lists, blocks of a list, how many are taken; microseconds of a call by batched_decode.choose_best, by
ranks, and in parts, and which of them ops.triton.batched_choice picks. Scores are normal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness import graph_ms

from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_choice import choose_in_parts, way_of
from saccade.ops.triton.batched_decode import choose_best
from saccade.ops.triton.batched_rank import choose_ranked
from saccade.selection.forms import Summarized
from saccade.selection.readings import Choice

SIZE, UNITS = 16, 8
CASES = [
    (rows, blocks, take)
    for rows, blocks, takes in (
        (1, 2048, (62, 126)), (1, 4100, (62, 126)), (1, 8200, (62, 126, 254)), (1, 32768, (62, 126, 510)),
        (8, 2048, (62, 126)), (8, 4100, (62, 126)), (8, 8192, (126,)), (8, 8200, (62, 126, 510)), (32, 8200, (126,)),
    )
    for take in takes
]  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", default="", help="blocks of a part, to try as well: 1024,4096")
    chunks = [int(chunk) for chunk in parser.parse_args().chunks.split(",") if chunk]
    ways: dict[str, Callable[..., Any]] = {"best": choose_best, "ranked": choose_ranked, "parts": choose_in_parts}
    for chunk in chunks:
        ways[f"parts of {chunk}"] = lambda *at, chunk=chunk: choose_in_parts(*at, chunk=chunk)
    for rows, blocks, take in CASES:
        took = {name: 1000 * timed(way, rows, blocks, take) for name, way in ways.items()}
        picked = way_of(rows, UNITS, blocks, take).__name__
        text = ", ".join(f"{name} {us:.1f}" for name, us in took.items())
        print(f"{rows * UNITS} lists of {blocks} blocks, {take} taken: {text} us; {picked}", flush=True)


def timed(way: Callable[..., Any], rows: int, blocks: int, take: int) -> float:
    torch.manual_seed(0)
    scores = torch.randn(4, rows, UNITS, blocks, device="cuda")
    scores[..., 0] = scores[..., -1] = -torch.inf  # the forced ones
    none = torch.empty(1, 1, 16, 16, device="cuda")
    table = torch.zeros(rows, 1, 8, dtype=torch.int32, device="cuda")
    lengths = torch.full((rows,), blocks * SIZE, dtype=torch.int32, device="cuda")
    pages = Pages(none, none, table, lengths, blocks * SIZE)
    choice = Choice(Summarized(SIZE, "minmax"), UNITS, 1, 1, (take + 2) * SIZE, take=take)
    numbers = [torch.full((rows,), number, dtype=torch.int32, device="cuda") for number in choice.numbers[:2]]
    return graph_ms([lambda own=own: way(own, pages, choice, *numbers) for own in scores], 40)


if __name__ == "__main__":
    main()
