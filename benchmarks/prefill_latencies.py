"""FlexPrefill's Table 3 and Fig. 6 on a CPU: what one layer's prefill attention takes under full attention,
StreamingLLM, MInference and FlexPrefill, by length, and the four parts of FlexPrefill's time.

    python benchmarks/prefill_latencies.py smollm2 -f dracula.txt --length 2048 --length 8000 --cache build/captures

Queries, keys and values are a model's own over a text, of ``--layers`` layers evenly spread; times are medians over
repeats, meaned over layers, bfloat16, one thread. Options in tokens are the paper's (StreamingLLM 1,000 first and
8,000 last keys, MInference's published lines, FlexPrefill's least budget) times length over 32K. ``--capture`` stops
after the captures are kept, so that times can be taken on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from paper_captures import Captured, captured, text_of, tokens_of
from paper_tables import PREFILL, filled

from saccade import LLM
from saccade.kv.view import KVView
from saccade.methods import Chunk, Policy
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.flexprefill.method import token_lines
from saccade.ops import Call, cpu, run
from saccade.ops.scores import mean_keys, needed_shares
from saccade.selection import Lines, Selection

T = TypeVar("T")
PARTS = ("representative attention", "pattern search", "index search", "sparse attention")


def timed(work: Callable[[], T], repeats: int) -> tuple[float, T]:
    """(median milliseconds, what it returned) after one call to warm up."""
    found, took = work(), []
    for _ in range(repeats):
        began = time.perf_counter()
        found = work()
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took), found


def layers_of(run: Captured, count: int) -> list[Chunk]:
    """The prompts of ``count`` layers, evenly spread, bfloat16."""
    places = [round(at * (len(run.layers) - 1) / max(1, count - 1)) for at in range(min(count, len(run.layers)))]
    chunks = []
    for layer in (run.layers[place] for place in places):
        q, k, v = (part[:, : run.context].bfloat16().contiguous() for part in (layer.q, layer.k, layer.v))
        chunks.append(Chunk.of(q, KVView.from_tensors(k, v), layer.scale, softcap=layer.softcap, layer=layer.number))
    return chunks


def attend(chunk: Chunk, selection: Selection) -> object:
    return run(Call(chunk.q, chunk.kv, selection, chunk.scale, chunk.softcap, threads=1))


def whole(chunk: Chunk, policy: str, repeats: int) -> tuple[float, float, float]:
    """(milliseconds to choose, to attend, share of the pairs read)."""
    method = Policy.parse(policy).prefill
    choosing, chosen = timed(lambda: method.select_prefill(chunk), repeats)
    attending, _ = timed(lambda: attend(chunk, chosen), repeats)
    return choosing, attending, chosen.density()


def parts(chunk: Chunk, method: FlexPrefill, repeats: int) -> tuple[list[float], Selection]:
    """Milliseconds of PARTS for a chunk none of whose heads is query-aware (Alg. 3, lines token by token), and what
    was chosen."""
    size = method.block_size
    first, (columns, slashes) = timed(lambda: method._sums(chunk), repeats)
    second, _ = timed(lambda: method._divergence(chunk, mean_keys(chunk.kv, size), columns), repeats)

    def index() -> Selection:
        shares = needed_shares(columns), needed_shares(slashes)
        return Lines.from_masks(chunk.shape, *token_lines(*shares, method.gamma, size, method.min_budget, None))

    third, lines = timed(index, repeats)
    return [first, second, third, timed(lambda: attend(chunk, lines), repeats)[0]], lines


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-f", "--file", type=Path, required=True)
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("build/captures"))
    parser.add_argument("--capture", action="store_true", help="keep the captures and time nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lengths = args.length or [2048, 4096, 8000]
    with LLM(
        args.model, dtype="float32", threads=1, max_model_len=max(lengths) + 2, enable_prefix_caching=False
    ) as llm:
        text = text_of(args.file, 0.3)
        runs = {n: captured(llm, tokens_of(llm, text, n + 1, 1, False), 1, args.cache) for n in lengths}
    if args.capture:
        return
    print(
        f"{args.model}, one layer of {len(runs[lengths[0]].layers)}, {cpu.isa()}, one thread, ms: choosing + attention"
    )
    rows: dict[str, list[str]] = {}
    for length, captures in runs.items():
        chunks = layers_of(captures, args.layers)
        names = {name: filled(text, 1024, min(length, 32768)) for name, text in PREFILL.items()}
        names |= {
            f"{name}, blocks": text.replace(")", ", lines=block)") for name, text in names.items() if "Flex" in name
        }
        for name, policy in names.items():
            found = [whole(chunk, policy, args.repeats) for chunk in chunks]
            choosing, attending, density = (statistics.fmean(part) for part in zip(*found))
            cell = f"{choosing:.1f} + {attending:.1f} ({100 * density:.0f} %)"
            rows.setdefault(name, []).append(cell)
            print(f"{length}, {name}: {cell}", file=sys.stderr, flush=True)
        method = Policy.parse(names["FlexPrefill, gamma 0.95"]).prefill
        assert isinstance(method, FlexPrefill)
        took = [statistics.fmean(part) for part in zip(*(parts(chunk, method, args.repeats)[0] for chunk in chunks))]
        for name, one in zip(PARTS, took):
            rows.setdefault(f"Fig. 6: {name}", []).append(f"{one:.1f} ({100 * one / sum(took):.0f} %)")
            print(f"{length}, Fig. 6, {name}: {one:.1f}", file=sys.stderr, flush=True)
    print(f"| | {' | '.join(map(str, runs))} |\n|---" + "|---:" * len(runs) + "|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
