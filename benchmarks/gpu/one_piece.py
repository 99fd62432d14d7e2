"""Where it pays to copy keys into one piece before a prefill kernel reads them: the last rows of a context, by pages
and by a copy.

    PYTHONPATH=. python benchmarks/gpu/one_piece.py [--contexts 32768,131072] [--rows 1024,2048,4096]

One line a case: milliseconds by the kernel that looks pages up, by the one that copies, and their ratio (below 1:
copying pays). Both run in turns; medians. Dense, blocks of 128 at several densities, xattention's products and
single lines.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator

import torch
from harness import DTYPE, HEAD_DIM, HEADS, KV_HEADS

from saccade.bench.inputs import make
from saccade.ops.triton import antidiagonals
from saccade.ops.triton import lines as line_ops
from saccade.ops.triton.choose import compact, compact_lines
from saccade.ops.triton.prefill import Config, attend_prefill
from saccade.selection import Blocks, Dense, Lines, Shape

SCALE = HEAD_DIM**-0.5
COPIED = Config(128, 128, 8, 3, copy=True)
Case = tuple[str, Callable[[], object], Callable[[], object]]


def seconds(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def some_lines(shape: Shape, density: float) -> Lines:
    """Columns and distances that together read about so much."""
    generator = torch.Generator("cuda").manual_seed(0)
    columns, distances = (
        torch.rand(shape.heads, shape.k_len, device="cuda", generator=generator) < density / 2 for _ in range(2)
    )
    distances[:, :128] = True
    columns[:, :4] = True
    return compact_lines(shape, columns, distances)


def copying_from(rows: int, call: Callable[[], object]) -> Callable[[], object]:
    """``call`` with the number of rows from which on ``lines.py`` copies."""

    def run() -> object:
        before, line_ops.LONG = line_ops.LONG, rows
        try:
            return call()
        finally:
            line_ops.LONG = before

    return run


def cases(context: int, rows: int) -> Iterator[Case]:
    problem = make(HEADS, KV_HEADS, HEAD_DIM, context, rows, DTYPE, device="cuda")
    q, view, shape = problem.q, problem.views[0], problem.shape

    def attend(selection: Dense | Blocks, config: Config) -> Callable[[], object]:
        return lambda: attend_prefill(q, view, selection, scale=SCALE, config=config)

    yield "dense", attend(Dense(shape), Config(64, 64, 4, 3)), attend(Dense(shape), COPIED)
    for density in (0.05, 0.12, 0.25, 0.5):
        chosen = blocks(shape, density)
        yield f"blocks {density}", attend(chosen, Config(128, 128, 8, 2)), attend(chosen, COPIED)
    for stride in (8, 16):

        def choose(config: antidiagonals.Config, stride: int = stride) -> Callable[[], object]:
            return lambda: antidiagonals._run(q, view, shape, stride, 128, 0.9, 0, SCALE, None, False, config)

        copied = antidiagonals.Config(128, 128, 64, 4, 3, copy=True)
        yield f"antidiagonals, stride {stride}", choose(antidiagonals.Config()), choose(copied)
    for density in (0.02, 0.05, 0.12):
        given = some_lines(shape, density)

        def read(given: Lines = given) -> object:
            return line_ops.attend_lines(q, view, given, scale=SCALE)

        yield f"lines {density}", copying_from(1 << 30, read), copying_from(1, read)


def blocks(shape: Shape, density: float) -> Blocks:
    """As ``harness.random_blocks``, of a chunk that ends the context."""
    generator = torch.Generator("cuda").manual_seed(0)
    first, stop = shape.q_start // 128, -(-shape.k_len // 128)
    row, column = torch.arange(first, stop, device="cuda")[:, None], torch.arange(stop, device="cuda")
    noise = torch.rand(shape.heads, stop - first, stop, device="cuda", generator=generator)
    return compact(shape, 128, ((noise < density) | (column == row) | (column == 0)) & (column <= row))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="32768,131072")
    parser.add_argument("--rows", default="1024,2048,4096")
    given = parser.parse_args()
    for context in map(int, given.contexts.split(",")):
        for rows in map(int, given.rows.split(",")):
            for name, paged, copied in cases(context, rows):
                for call in (paged, copied) * 2:
                    call()
                rounds = max(5, min(25, int(300 / (seconds(paged) + seconds(copied)))))
                taken = [(seconds(paged), seconds(copied)) for _ in range(rounds)]
                a, b = (statistics.median(part) for part in zip(*taken))
                print(
                    f"n={context} rows={rows} {name}: pages {a:.4f} ms, copied {b:.4f}, ratio {b / a:.3f}", flush=True
                )


if __name__ == "__main__":
    main()
