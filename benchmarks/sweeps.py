"""Ablations that papers print, over the suite: one option turned at a time, scores beside what was read.

python benchmarks/sweeps.py --list
python benchmarks/sweeps.py flexprefill-tau cis-table-6 --length 2048 --length 4096 --samples 3 --out sweeps

Results are kept below --out, so a killed run goes on, and a larger --samples adds to a smaller one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from ablations import SWEEPS, Sweep

from saccade.engine.settings.config import EngineConfig
from saccade.errors import SaccadeError
from saccade.eval.micro import micro_samples, micro_table
from saccade.eval.predict import take
from saccade.eval.runner import prepare, run_policies
from saccade.eval.setting import Setting, load
from saccade.eval.summary import Group, Run
from saccade.llm import LLM
from saccade.methods.policy import Policy

FIELDS = (
    "sweep",
    "policy",
    "protocol",
    "n",
    "score",
    "difference",
    "difference_low",
    "difference_high",
    "keys",
    "scored",
    "ratio",
    "recall",
)


def kept_of(llm: LLM, data: Path, policy: str, sweep: Sweep) -> float:
    """Mean share of the true attention's weight on the keys read, over layers, heads and rows of each task's first
    sample."""
    llm.reset_prefix_cache()  # what is taken over is not seen
    setting = Setting(Policy.parse(policy), sweep.protocol)
    rows = micro_table(list(micro_samples(llm, take(data, 1), setting, rows=32)), ("phase",))
    return float(next(row["mass"] for row in rows if row["phase"] == sweep.phase))


def measured(name: str, folders: list[Path], llm: LLM, data: Path) -> list[dict[str, object]]:
    """A row a policy: shares of 1, by the names of FIELDS."""
    sweep, group = SWEEPS[name], Group([Run.load(folder) for folder in folders])
    rows = []
    for run in group.runs:
        cell = group.cell(run)
        assert cell.score is not None
        assert cell.difference is not None
        scored, causal = cell.total(sweep.phase, "keys_scored"), cell.total(sweep.phase, "keys_causal")
        ratio = cell.retrieval_ratio if sweep.phase == "decode" else None
        interval = (cell.difference.mean, cell.difference.low, cell.difference.high)
        counts = (cell.density(sweep.phase), (scored or 0) / (causal or 1), ratio)
        recall = kept_of(llm, data, run.policy, sweep) if sweep.recall else None
        rows.append(
            dict(zip(FIELDS, (name, run.policy, sweep.protocol, cell.n, cell.score, *interval, *counts, recall)))
        )
    return rows


def table(name: str, rows: list[dict[str, object]]) -> str:
    lines = [
        f"| {SWEEPS[name].about} | score | minus dense [95 %] | keys read | keys scored | ratio | recall |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        score, gone, low, high, keys, scored = (100 * float(str(row[key] or 0)) for key in FIELDS[4:10])
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        recall = "" if row["recall"] is None else f"{100 * float(str(row['recall'])):.1f} %"
        shares = f"{keys:.1f} % | {scored:.1f} % | {ratio} | {recall}"
        lines.append(f"| `{row['policy']}` | {score:.1f} | {gone:+.1f} [{low:.1f}, {high:.1f}] | {shares} |")
    return "\n".join([*lines, f"({rows[0]['n']} samples, protocol {SWEEPS[name].protocol})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--model", default="reference")
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("--samples", type=int, default=3, help="of each task and length")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="file for all rows")
    parser.add_argument("--out", type=Path, default=Path("sweeps"))
    args = parser.parse_args()
    unknown = [name for name in args.sweeps if name not in SWEEPS]
    if unknown:
        parser.error(f"unknown sweep '{unknown[0]}'; known: {', '.join(SWEEPS)}")
    if args.list or not args.sweeps:
        for name, sweep in SWEEPS.items():
            print(f"{name:24} {sweep.about}")
        return
    lengths = args.length or [2048, 4096]
    # Policies that prefill alike compute each context once.
    model = EngineConfig(
        args.model, dtype="bfloat16", threads=args.threads, enable_prefix_caching=True, kv_memory="2GiB"
    )
    llm = load(model)
    kept: list[dict[str, object]] = []
    for name in args.sweeps:
        sweep = SWEEPS[name]
        samples = f"{'-'.join(map(str, lengths))}-{len(sweep.tasks)}-n{args.samples}"
        data = prepare(args.out / "data", sweep.tasks, lengths, args.samples, name=samples)
        folders = run_policies(
            *(data, llm, model, ["dense", *sweep.policies], args.out / "results"),
            protocol=sweep.protocol,
            oracle="none",
            mix=True,
            note=lambda text: print(text, file=sys.stderr) if "(" in text else None,
        )
        rows = measured(name, folders, llm, data)
        print(f"\n{name}\n\n{table(name, rows)}", flush=True)
        kept += rows
    if args.csv is not None:
        with args.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(kept)


if __name__ == "__main__":
    try:
        main()
    except SaccadeError as error:
        sys.exit(f"sweeps: {' '.join(str(error).split())}")
