"""The papers' figures of attention itself, on a model's own attention over natural text; and what decode methods do to
it: LFPS Fig. 2, 6 to 8, eq. 2 and Table 3; CIS's search ratios; LoopServe Obs. 1; FlexPrefill Fig. 3, 7, 8, 10; PrHS
Fig. 1, 2, 4, 8 and eq. 8. Truth is float64; selections are those of the methods themselves.

    python benchmarks/paper_figures.py smollm2 -f dracula.txt -f saccade --length 1024 --length 4096

Rows join those of ``--out``, a csv (a row of the same model, text, length and figure is replaced). ``--page`` writes
the page of all rows. Dense runs are kept in ``--cache``. ``--own`` decodes the model's greedy answer, not the text's.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import time
from pathlib import Path

import torch
from paper_captures import Captured, captured, text_of, tokens_of
from paper_measures import PARTS, measure
from paper_page import page
from paper_prefill import inputs
from window_perplexity import POLICIES, losses

from saccade import LLM
from saccade.files import write_text

FIELDS = ("model", "text", "length", "rows", "figure", "what", "mean", "low", "high")


def row_of(values: list[torch.Tensor]) -> dict[str, str]:
    """Mean, tenth and ninetieth hundredth of values [any] over layers, heads and steps."""
    whole = torch.cat([one.flatten().double() for one in values])
    if not whole.numel():
        return dict.fromkeys(("mean", "low", "high"), "")
    some = whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))[:200_000]]
    numbers = (whole.mean(), *torch.quantile(some, torch.tensor([0.1, 0.9], dtype=torch.float64)))
    return dict(zip(("mean", "low", "high"), (f"{round(float(one), 6):.4g}" for one in numbers)))


def windows(llm: LLM, ids: list[int]) -> list[dict[str, str]]:
    """Perplexity of the last quarter of a prefill beside dense's, by window and freeze: the ratio and its paired 95 %
    interval over tokens; and the pairs read."""
    found, dense = [], None
    policies = [policy for policy in POLICIES if "psi=0.2" not in policy]  # freezes into the last quarter
    for policy, own, pairs in losses(llm, [(ids, len(ids) // 4)], policies):
        dense = own if dense is None else dense
        apart, off = own - dense, 1.96 * float((own - dense).std()) / len(own) ** 0.5
        ratio = (float(apart.mean().add(shift).exp()) for shift in (0, -off, off))
        same = {"figure": "PrHS Table VI perplexity", "what": policy}
        found.append(same | dict(zip(("mean", "low", "high"), (f"{one:.5f}" for one in ratio))))
        found.append(
            {"figure": "PrHS Table VI pairs read", "what": policy, "mean": f"{pairs:.4f}", "low": "", "high": ""}
        )
    return found


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def join(path: Path, fresh: list[dict[str, str]]) -> None:
    """Write ``fresh`` rows among those of ``path``."""
    kept = {tuple(row[name] for name in FIELDS[:6]): row for row in [*read_rows(path), *fresh]}
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for _, row in sorted(kept.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("-f", "--file", type=Path, action="append", default=[], help="texts; a folder's Python files")
    parser.add_argument("--at", type=float, default=0.3, help="where in a text to begin, a share of it")
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--own", action="store_true", help="decode the model's own greedy continuation")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--windows", action="store_true", help="perplexity under PSAW and ETF, instead of --part")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/paper-figures.csv"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.model:
        lengths = args.length or [1024]
        with LLM(
            args.model, dtype="float32", threads=1, max_model_len=max(lengths) + 8, enable_prefix_caching=False
        ) as llm:
            before: dict[int, Captured] = {}
            for file in args.file:
                text = text_of(file, args.at)
                for length in lengths:
                    began, said = time.time(), f"{args.model}, {file.name}, {length}"
                    ids = tokens_of(llm, text, length, args.steps, args.own)
                    same = {"model": Path(args.model).name, "text": file.stem, "length": str(length)}
                    same["rows"] = "own" if args.own else "text"
                    if args.windows:
                        fresh = [same | row for row in windows(llm, ids)]
                    else:
                        run = captured(llm, ids, args.steps, args.cache)
                        print(f"{said}: captured, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
                        with torch.inference_mode():
                            found = measure(run, args.part or list(PARTS), 512 if length >= 4096 else 128)
                            if length in before and "loopserve" in (args.part or PARTS):
                                inputs(run, before[length], found)
                        before[length] = run
                        fresh = [{**same, "figure": f, "what": w, **row_of(v)} for (f, w), v in found.items()]
                    join(args.out, fresh)
                    print(f"{said}: {len(fresh)} rows, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    if args.page is not None:
        write_text(args.page, page(read_rows(args.out)))


if __name__ == "__main__":
    main()
