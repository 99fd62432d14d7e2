"""LFPS's decode step of one sequence: candidates from its tables and summaries, the best of them, attention, update.

Structured inputs. ``us`` is of a captured graph, as the other operators are measured; ``eager_us`` is what a step takes
with the host's part, as the engine runs it, a layer and request at a time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from harness import DTYPE, HEAD_DIM, HEADS, KV_HEADS, Results, graph_ms

from saccade.bench.inputs import make
from saccade.methods import Chunk, Query, parse_method
from saccade.ops import Call, Result, run

ROWS = 96
WARM = 16  # steps before any is measured
# On these inputs nearly every head rests on its sinks and is bypassed, unless epsilon forbids it.
POLICIES = ("lfps", *(f"lfps({at}epsilon=1.0)" for at in ("", "k=0.125, ", "blocks=0, ", "unit=kv_head, ")))


def lfps_steps(results: Results, context: int, best: float | None) -> None:
    """Rows of ``POLICIES`` at ``context``; ``best``: the fastest dense peer's milliseconds at batch 1."""
    problem = make(HEADS, KV_HEADS, HEAD_DIM, context, ROWS, DTYPE, device="cuda")
    view, start = problem.views[0], context - ROWS // 2
    for text in POLICIES:

        def measure(text: str = text) -> None:
            method = parse_method(text)
            with torch.inference_mode():
                rows = problem.q[:, : ROWS // 2]
                state = method.begin(Chunk.of(rows[:, -method.tail_rows :], view.upto(start)))

                def step(number: int) -> tuple[Any, Result]:
                    at = ROWS // 2 + number
                    query = Query.of(problem.q[:, at : at + 1], view.upto(start + number + 1), step=number)
                    selection = method.select_decode(query, state)
                    ran = run(Call.of(query.q, query.kv, selection, want_weights=True))
                    method.observe(query, ran.used, ran.weights, state)
                    return selection, ran

                for number in range(WARM):
                    selection, ran = step(number)
                torch.cuda.synchronize()
                began = time.perf_counter()
                for number in range(WARM, ROWS // 2):
                    step(number)
                torch.cuda.synchronize()
                eager = (time.perf_counter() - began) / (ROWS // 2 - WARM)
                ms = graph_ms([lambda: step(ROWS // 2 - 1)] * 2)
                lists, read = selection.offsets, ran.used.offsets
                results.add(
                    batch=1,
                    context=context,
                    what=text,
                    us=1000 * ms,
                    eager_us=1e6 * eager,
                    speedup=None if best is None else best / ms,
                    density=float(read[-1]) / (read.numel() - 1) / context,
                    candidates=float(lists[-1]) / (lists.numel() - 1) / context,
                    backend=ran.backend,
                )

        results.attempt(f"{text} n{context}", measure)
