"""What moving keys to a GPU and choosing among them on a CPU cost as contexts and batches grow (LFPS, Fig. 1a and 1b).

    python benchmarks/gpu/index_times.py [--shapes 8B Q S] [--contexts 4096 16384 65536 131072] [--batches 1 4 8]
        [--device cuda] [--clock cpu]

``transfer``: a quarter of one layer's keys from pinned memory to the device, measured, and at the paper's 32 GB/s;
beside them the layer's feed-forward part for as many rows. ``index``: a batch of four on one CPU thread, at one layer:
what a decode step takes beyond attention over the keys that it chose, by exact top-k of 5 %, by LFPS (its tables
planted so that 5 % are candidates; with what it learns) and by Quest (blocks of 16, 5 % of the keys). Keys are made up.
With ``--device cpu`` the copies are within host memory, and the feed-forward part is the CPU's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from harness import Results, time_ms
from torch import Tensor

from saccade.bench.decode import FLAT, TAIL, decoding, opened, query_rows
from saccade.bench.inputs import make
from saccade.bench.timing import CLOCKS
from saccade.methods import Query
from saccade.ops import Call, run

SHARE, LINK, BATCH = 0.05, 32e9, 4
INDEX = "index_ms"
PAPER = "lfps(k=0.05, a=0.02, epsilon=1, blocks=0, least=1, rest=none"
METHODS = {
    "exact top-k": "topk(k=0.05, unit=q_head)",
    "LFPS": f"{PAPER})@0.05",
    "LFPS, a list a KV head": f"{PAPER}, unit=kv_head)@0.05",
    "Quest, a list a head": "quest(budget={budget}, block_size=16, dense_layers=0, unit=q_head)",
    "Quest, a list a KV head": "quest(budget={budget}, block_size=16, dense_layers=0)",
}


@dataclass(frozen=True)
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int


SHAPES = {
    "8B": Sizes(32, 8, 128, 4096, 14336),
    "Q": Sizes(14, 2, 64, 896, 4864),  # Qwen2.5-Coder-0.5B
    "S": Sizes(9, 3, 64, 576, 1536),  # SmolLM2-135M
}


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median; on a CPU by the clock on the wall."""
    if device.type == "cuda":
        return time_ms(call)
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken[1:])


def transfers(results: Results, name: str, options: argparse.Namespace) -> None:
    """Fig. 1a."""
    sizes, device = SHAPES[name], torch.device(options.device)
    up, down = (
        torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02
        for shape in ((sizes.hidden, 2 * sizes.inner), (sizes.inner, sizes.hidden))
    )

    def forward(x: Tensor) -> Tensor:
        gate, value = (x @ up).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * value) @ down

    for batch in options.batches:
        x = torch.randn(batch, sizes.hidden, device=device, dtype=torch.bfloat16)
        inner = milliseconds(partial(forward, x), device, options.repeats)
        for context in options.contexts:
            count = batch * context * sizes.kv_heads * sizes.head_dim // 4
            here = torch.zeros(count, dtype=torch.bfloat16, device="cpu", pin_memory=device.type == "cuda")
            there = torch.empty_like(here, device=device)
            copy = partial(there.copy_, here, non_blocking=True)
            ms = milliseconds(copy, device, options.repeats)
            results.add(
                what="transfer",
                shape=name,
                context=context,
                batch=batch,
                mib=here.nbytes / 2**20,
                ms=ms,
                ms_at_32_gbps=1e3 * here.nbytes / LINK,
                feed_forward_ms=inner,
            )


def indexing(results: Results, name: str, options: argparse.Namespace) -> None:
    """Fig. 1b."""
    sizes, now = SHAPES[name], CLOCKS[options.clock]
    torch.set_num_threads(1)
    for context in options.contexts:
        problem = make(sizes.heads, sizes.kv_heads, sizes.head_dim, context, 1, torch.bfloat16)
        views = problem.views[:BATCH]
        for called, text in METHODS.items():
            text = text.replace("{budget}", str(round(SHARE * context)))
            method, _ = decoding(text)
            planted = float(text.partition("@")[2] or 0)
            rows = query_rows(problem, FLAT if planted else 1.0)
            states = [opened(method, problem, view, rows, planted, copy) for copy, view in enumerate(views)]
            whole, reading, read = [], [], 0.0
            for step in range(options.repeats + 2):
                q, spent = rows[:, TAIL // 2 + step % (TAIL // 2)][:, None], [0.0, 0.0]
                for view, state in zip(views, states):
                    began = now()
                    query = Query.of(q, view, step=step)
                    chosen = method.select_decode(query, state)
                    ran = run(Call.of(q, view, chosen, threads=1, want_weights=method.wants_weights))
                    method.observe(query, ran.used, ran.weights, state)
                    between = now()
                    run(Call.of(q, view, ran.used, threads=1))
                    spent[0] += between - began
                    spent[1] += now() - between
                    read = ran.used.density()
                whole.append(1e3 * spent[0])
                reading.append(1e3 * spent[1])
            ms, after = (statistics.median(one[2:]) for one in (whole, reading))
            results.add(
                what="index",
                shape=name,
                context=context,
                batch=BATCH,
                method=called,
                index_ms=ms - after,
                step_ms=ms,
                reading_ms=after,
                read=read,
            )


def table(rows: Sequence[dict[str, object]]) -> str:
    """Markdown of both figures."""
    first = [row for row in rows if row["what"] == "transfer"]
    second = [row for row in rows if row["what"] == "index"]
    lines = ["| shape | batch | keys | MiB | ms | at 32 GB/s | feed-forward ms |", "|---" + "|---:" * 6 + "|"]
    lines += [
        f"| {row['shape']} | {row['batch']} | {row['context']:,} | {row['mib']:.1f} | {row['ms']:.3f} "
        f"| {row['ms_at_32_gbps']:.3f} | {row['feed_forward_ms']:.3f} |"
        for row in first
    ]
    lines += ["", f"| shape | keys | {' | '.join(METHODS)} |", "|---|---:" + "|---:" * len(METHODS) + "|"]
    for shape, context in dict.fromkeys((row["shape"], row["context"]) for row in second):
        own = {row["method"]: row for row in second if (row["shape"], row["context"]) == (shape, context)}
        lines.append(f"| {shape} | {context:,} | {' | '.join(f'{own[one][INDEX]:.2f}' for one in METHODS)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 16384, 65536, 131072])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="of the choice: this process's or the wall's")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    results = Results("index_times")
    for name in options.shapes:
        transfers(results, name, options)
    for name in options.shapes:
        indexing(results, name, options)
    print(table(results.rows), flush=True)


if __name__ == "__main__":
    main()
