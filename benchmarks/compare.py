"""Old against new on one machine: interleaved pairs of ``saccade bench`` runs, and the ratio of each row's times.

    python benchmarks/compare.py OLD NEW [--pairs 9] [--only generate] [--folder results]

OLD and NEW are checkouts with their own ``.venv``. Every pair runs each benchmark once in both, old first in even
pairs and new first in odd ones, so that a drift of the machine falls on both alike. The median ratio of a row comes
with the 95 % interval of its mean by Student's t on the logarithms. The exit code is 0 if the geometric mean of all
ratios is at most 1.02 and no row's interval lies wholly above 1.05, else 1.

The settings are short: float32, one thread, the process's own time (which a busy machine disturbs less than the
wall's).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_MEAN, MOST_ROW = 1.02, 1.05
COMMON = ("--dtype", "float32", "--threads", "1", "--clock", "cpu")
SMALL = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--repeats", "7")
BENCHES: dict[str, tuple[str, ...]] = {
    "ops prefill": (
        *("ops", "--suite", "prefill", "--contexts", "2048", "--densities", "0.25", *SMALL),
        *("--methods", "streaming;flexprefill;minference;xattention;loopserve"),
    ),
    "ops decode": (
        *("ops", "--suite", "decode", "--contexts", "16384", "--densities", "0.1", *SMALL),
        *("--methods", "streaming;psa;lfps(unit=kv_head);cis(unit=kv_head);arkvale;quest"),
    ),
    "generate": (
        *("generate", "--contexts", "4096", "--synthetic-kv", "--tokens", "16"),
        *("--methods", "dense;streaming;psa;lfps(unit=kv_head);cis(unit=kv_head);arkvale"),
    ),
    "ttft": ("ttft", "--contexts", "512", "--chunk", "256", "--methods", "dense;flexprefill@0.25;a_shape@0.25"),
}
TIMES = ("ms", "ms_per_token", "seconds")  # the column of ops, generate and ttft that counts

# Two-sided 95 % points of Student's t, by degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

Times = dict[str, float]  # the time of each row, by its name


@dataclass(frozen=True)
class Ratio:
    """New over old of one row: the median over pairs, and a 95 % interval."""

    row: str
    median: float
    low: float
    high: float
    log_mean: float


def row_times(bench: str, facts: Mapping[str, Any]) -> Times:
    """The times of one ``--json`` file by row; ValueError where a row has none, or two rows share a name."""
    times: Times = {}
    for row in facts["rows"]:
        name = f"{bench} {row['context']} {row['method']}"
        column = next((column for column in TIMES if column in row), None)
        if column is None or not row[column] > 0:
            raise ValueError(f"{name}: no time above 0 among {', '.join(TIMES)}")
        if name in times:
            raise ValueError(f"two rows are called '{name}'")
        times[name] = row[column]
    return times


def ratios(pairs: Sequence[tuple[Times, Times]]) -> list[Ratio]:
    """Of (old, new) times, the ratio of each row; ValueError for fewer than two pairs, or rows that are not in all."""
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pairs have no interval; give at least 2")
    names = list(pairs[0][0])
    for times in (times for pair in pairs for times in pair):
        if unlike := set(names) ^ set(times):
            raise ValueError(f"not every run has the rows: {', '.join(sorted(unlike))}")
    point = STUDENT[min(len(pairs) - 1, len(STUDENT)) - 1]
    found = []
    for name in names:
        logs = [math.log(new[name] / old[name]) for old, new in pairs]
        mean, reach = statistics.fmean(logs), point * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(mean - reach), math.exp(mean + reach)
        found.append(Ratio(name, math.exp(statistics.median(logs)), low, high, mean))
    return found


def verdict(rows: Sequence[Ratio]) -> tuple[float, list[str]]:
    """The geometric mean over all rows, and the names of rows that are slower for certain."""
    mean = math.exp(statistics.fmean(row.log_mean for row in rows))
    return mean, [row.row for row in rows if row.low > MOST_ROW]


def run(checkout: Path, bench: str, file: Path) -> Times:
    """Run one benchmark in ``checkout``; SystemExit with its last lines where it fails."""
    command = [str(checkout / ".venv/bin/python"), "-m", "saccade", "bench", *BENCHES[bench], *COMMON]
    done = subprocess.run(
        [*command, "--json", str(file)],
        cwd=checkout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} in {checkout}:\n" + "\n".join(done.stderr.splitlines()[-20:]))
    return row_times(bench, json.loads(file.read_text()))


def measure(old: Path, new: Path, benches: Sequence[str], pairs: int, folder: Path) -> list[tuple[Times, Times]]:
    """Times of all rows of all pairs; every file is kept in ``folder``."""
    found = []
    for pair in range(pairs):
        both: tuple[Times, Times] = ({}, {})
        for bench in benches:
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                file = folder / f"{bench.replace(' ', '-')}-{pair}-{('old', 'new')[side]}.json"
                both[side].update(run((old, new)[side], bench, file))
            print(f"pair {pair + 1} of {pairs}: {bench}", file=sys.stderr, flush=True)
        found.append(both)
    return found


def table(rows: Sequence[Ratio]) -> str:
    width = max(len(row.row) for row in rows)
    lines = [f"{'row':{width}}  median  95 % interval"]
    lines += [f"{row.row:{width}}  {row.median:6.3f}  {row.low:.3f} to {row.high:.3f}" for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", action="append", choices=list(BENCHES), help="one benchmark; may be given again")
    parser.add_argument("--folder", type=Path, help="where the files of all runs are kept; by default nowhere")
    options = parser.parse_args(arguments)
    benches = options.only or list(BENCHES)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = ratios(measure(options.old.resolve(), options.new.resolve(), benches, options.pairs, folder))
    mean, slower = verdict(rows)
    print(table(rows))
    print(f"geometric mean {mean:.4f} (at most {MOST_MEAN}): {'holds' if mean <= MOST_MEAN else 'FAILS'}")
    print(f"rows wholly above {MOST_ROW}: {', '.join(slower) or 'none'}")
    return 0 if mean <= MOST_MEAN and not slower else 1


if __name__ == "__main__":
    sys.exit(main())
