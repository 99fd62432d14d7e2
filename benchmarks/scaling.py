"""How decode steps and prefills of one layer scale with threads on this machine: `saccade bench ops` in one process.

    python benchmarks/scaling.py decode [--contexts 131072] [--threads 1,2,4,8,16] [--methods ...] [--limit SECONDS]
    python benchmarks/scaling.py prefill --contexts 32768 [--heads 32 --kv-heads 8]

Medians in milliseconds of one layer. Decode: one row as the engine calls for it (ops.cpu_plans), which chooses, reads
and learns; rows that such a call does not serve run as `saccade bench ops` runs them, marked "apart". Layers with the
same keys at different places take turns, so that caches are cold. The last column is the share of the rows' time that
goes to choosing and learning, with the most threads. Prefill: beside torch's sdpa over all heads. The last line has the
matrix rate and the bandwidth of reading in order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from saccade.bench import limits
from saccade.bench.decode import FLAT, TAIL, decoding, opened, query_rows
from saccade.bench.inputs import Problem, make, random_blocks
from saccade.bench.timing import median_ms
from saccade.methods import Chunk, Query, parse_method
from saccade.methods.base import Method
from saccade.methods.device_state import Opening
from saccade.methods.host_state import HostState
from saccade.models.interface import ModelSpec
from saccade.ops import Call, run
from saccade.ops.cpu_plans import PlannedRow, PlannedRows
from saccade.ops.cpu_readings import Readings, serves
from saccade.selection import Dense

DECODE = (
    "dense;streaming;quest(dense_layers=0);arkvale;psa(epsilon=0.98);lfps(a=0.02, epsilon=1, blocks=0, rest=none)@0.02;"
    "lfps(unit=kv_head, blocks=0);topk(k=0.02, unit=kv_head);cis(k=0.02, unit=kv_head)"
)
BLOCK = 16  # steps of a block of CIS
PREFILL = "dense;blocks@0.1;flexprefill(lines=block)"


def spec_of(problem: Problem) -> ModelSpec:
    shape = problem.shape
    layers = len(problem.views)
    return ModelSpec(
        family="llama",
        layers=layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=problem.q.shape[2],
        vocab_size=1,
        max_position=shape.k_len,
        dtype=problem.q.dtype,
        windows=(None,) * layers,
    )


class Planned:
    """Decode rows at the last ``BLOCK`` positions as the engine plans them, step by step."""

    def __init__(self, problem: Problem, method: Method, states: list[object]) -> None:
        self._problem, self._method, self._states = problem, method, states
        self._spec, self._kv, self._first = spec_of(problem), problem.sequence, problem.shape.k_len - BLOCK
        self._plan = method.device_plan(self._spec)
        self._state: HostState | None = None
        self.serves = self._plan is not None and self.row(0) is not None

    def row(self, step: int) -> PlannedRow | None:
        plan, length = self._plan, self._first + step % BLOCK + 1
        summarized, reads = plan.blocks, None
        if not plan.listed:
            if step % BLOCK == 0:
                opening = Opening(self._states, self._kv, self._spec, self._first, length)
                self._state = self._method.host_state(opening)
            reads = None if self._state is None else self._state.reads(length)
            summarized = None if self._state is None else self._state.summarized
        elif all(serves(one, self._spec.kv_heads) is None for one in plan.layers):
            reads = Readings(plan.layers)
        if reads is None:
            return None
        summaries = ()
        if summarized is not None and (plan.choice is None or length > plan.choice.dense_upto):
            summaries = self._kv.summaries(summarized.summary, summarized.size)
        return PlannedRow(0, length - 1, self._kv.tables, reads, summaries)

    def step(self, step: int) -> PlannedRows:
        storage = self._kv.pool.storage
        return PlannedRows([self.row(step)], storage.k, storage.v, own_products=True)


def decode_rows(problem: Problem, name: str, counts: list[int], repeats: int) -> list[str]:
    """Milliseconds by number of threads."""
    method, _ = decoding(name)
    planted = float(name.partition("@")[2] or 0)
    rows = query_rows(problem, FLAT if planted else 1.0)
    states = [opened(method, problem, view, rows, planted, copy) for copy, view in enumerate(problem.views)]
    planned = Planned(problem, method, states)
    searches = name.startswith("cis")  # in some steps
    warm, steps = (0, BLOCK) if searches else (2, repeats)
    cells = []
    for threads in counts:
        torch.set_num_threads(threads)
        times, shares = [], [0.0]
        for step in range(warm + steps):
            q = rows[:, TAIL // 2 + step % (TAIL // 2)][:, None]
            one = planned.step(step) if planned.serves else None
            for layer, view in enumerate(problem.views):
                out = torch.empty(1, q.shape[0], q.shape[2], dtype=q.dtype)
                began = time.perf_counter()
                if one is None:
                    apart(method, q, view, states[layer], step, threads)
                else:
                    shares.append(one.run(layer, q, None, None, out, problem.scale, None, threads, watched=True))
                if step >= warm:
                    times.append(time.perf_counter() - began)
        cells.append(f"{1000 * (statistics.fmean if searches else statistics.median)(times):.3f}")
    return [f"`{name}`" + ("" if planned.serves else " (apart)"), *cells, f"{100 * statistics.median(shares):.0f} %"]


def same_blocks(problem: Problem, name: str, counts: list[int], repeats: int) -> list[str]:
    """What one call over the blocks takes that a row of ``name`` read."""
    method, _ = decoding(name)
    rows = query_rows(problem, 1.0)
    states = [opened(method, problem, view, rows, 0.0, copy) for copy, view in enumerate(problem.views)]
    q = rows[:, TAIL // 2][:, None]
    used = [
        run(Call.of(q, view, method.select_decode(Query.of(q, view), state), threads=counts[-1])).used
        for view, state in zip(problem.views, states)
    ]
    calls = [partial(run, Call.of(q, view, one)) for view, one in zip(problem.views, used)]
    cells = []
    for threads in counts:
        torch.set_num_threads(threads)
        cells.append(f"{median_ms(calls, len(calls) * repeats):.3f}")
    return [f"the {100 * used[0].density():.1f} % of blocks that it read, in one call", *cells, "0 %"]


def apart(method: Method, q: torch.Tensor, view: object, state: object, step: int, threads: int) -> None:
    """As `saccade bench ops` has it."""
    query = Query.of(q, view, step=step)
    call = Call.of(q, view, method.select_decode(query, state), threads=threads, want_weights=method.wants_weights)
    ran = run(call)
    method.observe(query, ran.used, ran.weights, state)


def prefill_call(problem: Problem, name: str, threads: int) -> Callable[[], object]:
    view, shape = problem.views[0], problem.shape
    if name.startswith("blocks@"):
        fixed = random_blocks(shape, 128, float(name.partition("@")[2]), shape.heads)
        return lambda: run(Call.of(problem.q, view, fixed, threads=threads))
    if name == "dense":
        return lambda: run(Call.of(problem.q, view, Dense(shape), threads=threads))
    method = parse_method(name)
    return lambda: run(Call.of(problem.q, view, method.select_prefill(Chunk.of(problem.q, view)), threads=threads))


def table(header: list[str]) -> None:
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=("decode", "prefill"))
    parser.add_argument("--contexts", default="131072")
    parser.add_argument("--threads", default="1,2,4,8,16")
    parser.add_argument("--methods")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no row begins")
    chosen = parser.parse_args()
    began = time.monotonic()
    counts = [int(one) for one in chosen.threads.split(",")]
    methods = (chosen.methods or (DECODE if chosen.suite == "decode" else PREFILL)).split(";")
    torch.set_num_threads(max(counts))
    torch.set_grad_enabled(False)
    print(f"{limits.machine()}\n")
    for context in map(int, chosen.contexts.split(",")):
        torch.set_num_threads(max(counts))
        q_len = 1 if chosen.suite == "decode" else context
        problem = make(chosen.heads, chosen.kv_heads, chosen.head_dim, context, q_len, torch.bfloat16)
        print(f"{context} keys, {chosen.heads}/{chosen.kv_heads} heads of {chosen.head_dim}, bfloat16, ms\n")
        table(["row \\ threads", *map(str, counts), *(["choosing"] if chosen.suite == "decode" else [])])
        for name in [] if chosen.suite == "prefill" else methods:
            if time.monotonic() - began < chosen.limit:
                print("| " + " | ".join(decode_rows(problem, name, counts, chosen.repeats)) + " |", flush=True)
            if name.startswith("psa") and time.monotonic() - began < chosen.limit:
                print("| " + " | ".join(same_blocks(problem, name, counts, chosen.repeats)) + " |", flush=True)
        lines: dict[str, list[str]] = {}
        for threads in counts if chosen.suite == "prefill" else []:
            torch.set_num_threads(threads)
            for name in methods:
                if time.monotonic() - began < chosen.limit:
                    ms = median_ms([prefill_call(problem, name, threads)], chosen.repeats)
                    lines.setdefault(f"`{name}`", []).append(f"{ms:.1f}")
            if time.monotonic() - began < chosen.limit:
                q, k, v = (part[None] for part in (problem.q, problem.k, problem.v))
                sdpa = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
                lines.setdefault("torch sdpa", []).append(f"{median_ms([sdpa], chosen.repeats):.1f}")
        for name, cells in lines.items():
            print("| " + " | ".join([name, *cells]) + " |", flush=True)
        cells = []
        for threads in counts:
            torch.set_num_threads(threads)
            found = limits.measure(torch.bfloat16, threads)
            cells.append(f"{found['gemm_gflops']:.0f} GF/s, {found['read_gbps']:.1f} GB/s")
        print("| limits | " + " | ".join(cells) + " |\n", flush=True)


if __name__ == "__main__":
    main()
