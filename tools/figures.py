"""The README's numbers on this machine: ``make figures`` runs the project's own measurements and keeps a history.

    python tools/figures.py [PART ...] [--quick] [--threads N] [--llama-bench BIN] [--record FOLDER]

Each part of ``tools/figures.toml`` is a command of this project; what it says becomes a table. A run is appended to
``figures.json`` in ``docs/results`` (or ``--record``) with the machine, the date and the commit, and ``figures.md`` is
written from it. ``--quick`` tries all parts on short inputs and marks the run as a trial, whose numbers say nothing. A
part that fails is named, and the others are kept. A part that needs a fetched model is left out without it, with a
line that says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "results"
PARTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
Table = tuple[list[str], list[list[str]]]  # columns, and rows of as many cells


def markdown_table(text: str) -> Table:
    """The first Markdown table of a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    if len(lines) < 3:
        raise ValueError("no table")
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return head, rows


def drawn_table(text: str) -> Table:
    """The first table that a command draws for a terminal."""
    lines = [line.strip() for line in text.partition("└")[0].splitlines()]
    heads = [line.strip("┃").split("┃") for line in lines if line.startswith("┃")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    if not heads or not rows:
        raise ValueError("no table")
    return [" ".join(word.strip() for word in words if word.strip()) for words in zip(*heads, strict=True)], rows


def step_lines(text: str) -> Table:
    """What ``benchmarks/quantised_steps.py`` says of each context: lines of its own, and rows of a peer's table."""
    own = re.findall(r"^\s*([\d,]+) (\S.*?): ([\d.]+) ms a token \(([\d.]+) tokens/s\)", text, re.MULTILINE)
    rows = [["Saccade", length, f"`{policy}`", ms, rate] for length, policy, ms, rate in own]
    for length, rate in re.findall(r"^\|.*\| *tg\d+ @ d(\d+) *\| *([\d.]+)", text, re.MULTILINE):
        rows.append(["llama.cpp", f"{int(length):,}", "–", f"{1000 / float(rate):.2f}", rate])
    if not own:
        raise ValueError("no step")
    return ["engine", "context", "policy", "ms a token", "tokens/s"], rows


def second_lines(text: str) -> Table:
    """What ``benchmarks/sessions.py`` says: what took the time, seconds and a remark in each line."""
    found = re.findall(r"^(\S.*?) {2,}([\d.]+)(?:[; ]+(.*))?$", text, re.MULTILINE)
    if not found:
        raise ValueError("no line of seconds")
    return ["what", "seconds", "remark"], [list(one) for one in found]


READ: dict[str, Callable[[str], Table]] = {
    "markdown": markdown_table,
    "drawn": drawn_table,
    "steps": step_lines,
    "seconds": second_lines,
}


def disk() -> str:
    """A table of the gigabytes that Saccade and its required packages take on the disk, and the largest of them."""
    from packaging.requirements import Requirement

    sizes: dict[str, int] = {}
    waiting = ["saccade-llm"]
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in sizes:
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        files = [Path(str(found.locate_file(file))) for file in found.files or ()]
        sizes[name] = sum(file.stat().st_size for file in files if file.is_file())
        needed = map(Requirement, found.requires or ())
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    shown = [("all", sum(sizes.values())), *sorted(sizes.items(), key=lambda one: -one[1])[:4]]
    lines = [f"| {name} | {size / 1e9:.1f} |" for name, size in shown]
    return "\n".join(["| package | GB |", "|---|---|", *lines])


def measure(part: dict[str, Any], places: dict[str, str], gpu: bool, quick: bool) -> dict[str, Any]:
    """Run a part. Its command, seconds and table; RuntimeError with the end of what it said where it failed."""
    line = part.get("gpu", part["command"]) if gpu else part["command"]
    line = (
        f"{line} {part.get('quick', '') if quick else ''}{places['peer'] if part['table'] == 'steps' else ''}".strip()
    )
    with tempfile.TemporaryDirectory() as scratch:
        words = [_filled(word, {**places, "scratch": scratch}) for word in shlex.split(line)]
        began = time.perf_counter()
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        took = time.perf_counter() - began
        written = Path(scratch) / "table.md"
        said = written.read_text(encoding="utf-8") if written.is_file() else done.stdout
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    try:
        columns, rows = READ[part["table"]](said)
    except ValueError as error:
        raise RuntimeError(f"{error} in what it wrote: {said[-500:]}") from None
    shown = {"file": "build/real/smollm2.gguf", "folder": "build/real/smollm2", "scratch": "build"}
    return {"command": _filled(line, {**places, **shown}), "seconds": round(took, 1), "columns": columns, "rows": rows}


def _filled(text: str, places: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: places[found[1]], text)


def here(gpu: bool) -> dict[str, Any]:
    """Date, commit, machine and versions of a run. A ``+`` behind the commit: what is measured was changed since."""
    import torch

    from saccade.bench.limits import machine

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = "+" if git("status", "--porcelain", "--", "saccade", "csrc", "benchmarks") else ""
    facts = machine(torch.device("cuda") if gpu else None)
    commit = git("rev-parse", "--short=8", "HEAD") or "unknown"  # such as from an archive
    return {"date": datetime.date.today().isoformat(), "commit": commit + changed, "machine": facts}


def name_of(run: dict[str, Any]) -> str:
    """What a run was measured on."""
    machine = run["machine"]
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    return f"{machine['processor']}, {machine['cores']} cores, {machine['isa'] or 'no kernels'}{gpu}"


def page(runs: Sequence[dict[str, Any]]) -> str:
    """``figures.md``: a row a run, newest first, then the newest whole table of each part and machine."""
    head = ["date", "machine", "commit", *PARTS]
    table = [_line(head), _line(["---"] * len(head))]
    for run in reversed(runs):
        date = f"{run['date']}, quick: a trial" if run["quick"] else run["date"]
        table.append(_line([date, name_of(run), run["commit"], *(_headline(run, name) for name in PARTS)]))
    quoted = "; ".join(f"{name}, {part['shown'][1]} of `{part['shown'][0].strip()}`" for name, part in PARTS.items())
    blocks = [
        "# Figures of one machine after another",
        "`make figures` measures the README's numbers on the machine at hand and appends a row here; with\n"
        '`PARTS="demo decode"` it measures some of them, with `LLAMA_BENCH=BIN` a `llama-bench` of llama.cpp, too.\n'
        "`make figures QUICK=1` tries everything on short inputs, and its row says so. A `+` behind a commit: the\n"
        "code was changed since.",
        "\n".join(table),
        f"A row quotes: {quoted}.",
    ]
    for run, name in newest(runs):
        found, torch = run["parts"][name], run["machine"]["torch"]
        made = f"torch {torch}, {run['date']}, commit {run['commit']}."
        rows = [found["columns"], ["---"] * len(found["columns"]), *found["rows"]]
        blocks += [f"## {PARTS[name]['title']}: {name_of(run)}", made, f"```\npython {found['command']}\n```"]
        blocks.append("\n".join(map(_line, rows)))
    return "\n\n".join(blocks) + "\n"


def newest(runs: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """(run, part) of the newest whole measurement of each part on each machine; trials are left out."""
    found = {(name, name_of(run)): (run, name) for run in runs if not run["quick"] for name in run["parts"]}
    order = list(PARTS)
    return [found[key] for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _headline(run: dict[str, Any], name: str) -> str:
    word, column = PARTS[name]["shown"]
    if (found := run["parts"].get(name)) is None or column not in found["columns"]:
        return "–"
    at = found["columns"].index(column)
    return next((row[at] for row in found["rows"] if any(word in f"{cell} " for cell in row)), "–")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a trial on short inputs, marked as one")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--llama-bench", default="", help="a llama-bench of llama.cpp, which gets the same file")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--disk", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.disk:
        print(disk())
        return 0
    if unknown := [name for name in args.part if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; known: {', '.join(PARTS)}")
    from saccade.machine import best_device

    gpu = best_device() != "cpu"
    real = Path(os.environ.get("SACCADE_REAL", ROOT / "build" / "real"))
    places = {"threads": str(args.threads), "file": str(real / "smollm2.gguf"), "folder": str(real / "smollm2")}
    places["peer"] = f' --peer "{args.llama_bench} -fa 1"' if args.llama_bench else ""
    file = args.record / "figures.json"
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []
    run: dict[str, Any] = {**here(gpu), "quick": args.quick, "parts": {}}
    failed = 0
    for name in args.part or PARTS:
        part = PARTS[name]
        if "needs" in part and not Path(needed := _filled(part["needs"], places)).exists():
            print(f"{name}: left out, {needed} is not there: make real MODELS=smollm2", flush=True)
            continue
        try:
            run["parts"][name] = measure(part, places, gpu, args.quick)
        except RuntimeError as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        print(f"{name}: {run['parts'][name]['seconds']:.0f} s", flush=True)
        args.record.mkdir(parents=True, exist_ok=True)  # part by part: what is done stays when the next one is stopped
        told = json.dumps({"runs": [*runs, run]}, indent=1, ensure_ascii=False) + "\n"
        file.write_text(told, encoding="utf-8")
        (args.record / "figures.md").write_text(page([*runs, run]), encoding="utf-8")
    return 1 if failed or not run["parts"] else 0


if __name__ == "__main__":
    sys.exit(main())
