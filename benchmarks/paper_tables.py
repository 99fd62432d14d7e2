"""The papers' tables of answers in form, on a model and a text of yours: LoopServe's Table 4 and Figs. 7 and 10,
FlexPrefill's Tables 1, 2 and 4.

    python benchmarks/paper_tables.py smollm2 -f dracula.txt --frame loopserve-table4 --length 4096 --samples 10

Samples are fitted to ``--length`` tokens of the model. Options that papers give in tokens are scaled by ``--budget``
over the paper's 1024, and, for FlexPrefill's peers, by ``--length`` over 32K. Every sample is paired with dense
attention's. A killed run goes on where it was; rows join those of ``--out``, and ``--page`` writes the page of all.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from tables_page import FIELDS, page, read_rows

from saccade.engine.settings.config import EngineConfig
from saccade.eval.runner import given_by, prepare, run_policies
from saccade.eval.samples import POSITIONS
from saccade.eval.setting import load
from saccade.eval.summary import Cell, Group, load_groups
from saccade.files import write_text

SETS = ("mtsyn_qa", "mtsyn_multidoc", "mtsyn_summary", "mtsyn_fewshot")


def turns(*sets: str) -> tuple[str, ...]:
    return tuple(f"mtlb:{name}:{position}" for name in sets for position in POSITIONS)


@dataclass(frozen=True)
class Frame:
    """``policies``: text by column, ``dense`` first. In them ``{B}`` is the budget and ``{4B}``, ``{B/8}`` of it what
    they say; ``{n}`` stands for n tokens of a prompt of 32K, in the share of it."""

    tasks: tuple[str, ...]
    policies: dict[str, str]


ANSWERS = "loopserve(alpha=0.955, budget={B}"
PREFILL = {
    "dense": "dense",
    "StreamingLLM": "streaming(sinks={1000}, window={8000})+dense",
    "MInference": "minference(vertical={1000}, slash={6096})",
    "FlexPrefill, gamma 0.9": "flexprefill(gamma=0.9, min_budget={1024})",
    "FlexPrefill, gamma 0.95": "flexprefill(gamma=0.95, min_budget={1024})",
}
FRAMES = {
    "loopserve-table4": Frame(
        turns(*SETS),
        {
            "dense": "dense",
            "SnapKV": "snapkv(capacity={B}, window={B/16})",
            "Ada-KV": "adakv(capacity={B}, window={B/16})",
            "StreamingLLM": "prefill=dense,decode=streaming(sinks=4, window={B})",
            "A-shape": "a_shape(sinks={B/8}, window={31B/8})",
            "Tri-shape": "tri_shape(sinks={B/8}, window={31B/8}, last={B/8})",
            "MInference": "minference(vertical={B}, slash={6B})",
            "LoopServe": ANSWERS + ")",
        },
    ),
    "loopserve-fig7": Frame(
        turns("mtsyn_qa", "mtsyn_multidoc"),
        {
            "dense": "dense",
            "LoopServe-P": "prefill=loopserve(alpha=0.955)",
            "LoopServe-D": "prefill=dense,decode=loopserve(budget={B})",
            "LoopServe": ANSWERS + ")",
            "LoopServe, alpha 0.995": "loopserve(budget={B})",
        },
    ),
    "loopserve-fig8": Frame(
        turns("mtsyn_qa", "mtsyn_multidoc"),
        {
            "dense": "dense",
            **{
                f"alpha {one}": f"loopserve(alpha={one}, budget={{B}})"
                for one in (0.955, 0.98, 0.985, 0.99, 0.995, 0.999)
            },
        },
    ),
    "loopserve-fig9": Frame(
        turns("mtsyn_qa", "mtsyn_multidoc"),
        {
            "dense": "dense",
            "B / 4": "loopserve(alpha=0.955, budget={B/4})",
            "B / 2": "loopserve(alpha=0.955, budget={B/2})",
            "B": ANSWERS + ")",
            "2 B": "loopserve(alpha=0.955, budget={2B})",
            "4 B": "loopserve(alpha=0.955, budget={4B})",
        },
    ),
    "loopserve-fig10": Frame(
        turns("mtsyn_summary"),
        {
            "dense": "dense",
            "n_d = 4": ANSWERS + ", n_d=4)",
            "n_d = 16": ANSWERS + ")",
            "n_d = 32": ANSWERS + ", n_d=32)",
            "n_d = 64": ANSWERS + ", n_d=64)",
            "n_d = 16, from the first token": ANSWERS + ", first=0)",
            "n_d = 64, from the first token": ANSWERS + ", n_d=64, first=0)",
        },
    ),
    "flexprefill-table1": Frame(("ruler:all",), PREFILL),
    "flexprefill-table2": Frame(("ibsyn:all",), PREFILL),
    "flexprefill-table4": Frame(
        ("ruler:all",),
        {
            "dense": "dense",
            "LM-Infinite, half of the context": "streaming(sinks=10, window={16384})",
            "LM-Infinite, a quarter": "streaming(sinks=10, window={8192})",
            "InfLLM": "infllm(sinks={128}, window={4096}, budget={2048}, block_size=32)",
            "MInference": PREFILL["MInference"],
            "FlexPrefill, gamma 0.95": PREFILL["FlexPrefill, gamma 0.95"],
        },
    ),
}


def filled(policy: str, budget: int, length: int) -> str:
    """``policy`` with its tokens: ``{6B}``, ``{B/8}``, ``{31B/8}`` of the budget, ``{1000}`` of 32K."""

    def one(name: str) -> str:
        if "B" not in name:
            return str(max(1, round(int(name) * length / 32768)))
        times, _, parts = name.partition("B")
        return str(max(1, int(times or 1) * budget // int(parts.removeprefix("/") or 1)))

    pieces = policy.split("{")
    return pieces[0] + "".join(one(name) + rest for name, _, rest in (piece.partition("}") for piece in pieces[1:]))


def rows_of(group: Group, labels: dict[str, str], same: dict[str, str]) -> list[dict[str, str]]:
    """A row for each task and policy of ``labels`` (label by policy text), over the samples that all runs answered."""
    answered = set.intersection(*(set(run.rows) for run in group.runs))
    found = []
    for run in group.runs:
        label = labels.get(run.policy)
        if label is None:
            continue
        for task in run.tasks:
            cell = group.cell(run, lambda row, wanted=task: row["task"] == wanted and row["id"] in answered)  # type: ignore[misc]
            if cell.n:
                found.append(same | {"task": task, "method": label, "policy": run.policy} | _numbers(cell))
    return found


def _numbers(cell: Cell) -> dict[str, str]:
    pairs = ";".join(f"{own:.4g}:{base:.4g}" for own, base in cell.pairs)
    whole = (cell.total(phase, name) for phase in ("prefill", "decode") for name in ("keys_attended", "keys_causal"))
    counts = dict(zip(("prefill_read", "prefill_seen", "decode_read", "decode_seen"), (str(one or 0) for one in whole)))
    return {"n": str(cell.n), "pairs": pairs, **counts}


def join(path: Path, fresh: list[dict[str, str]]) -> None:
    """Write ``fresh`` rows among those of ``path``, in the order of frames, models, tasks and policies."""
    kept = {tuple(row[name] for name in FIELDS[:6]): row for row in [*read_rows(path), *fresh]}
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    order = list(FRAMES)
    writer.writerows(sorted(kept.values(), key=lambda row: (order.index(row["frame"]), row["model"], row["length"])))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("-f", "--file", type=Path, help="a text (UTF-8) for the prose; RULER's has its own")
    parser.add_argument("--frame", choices=FRAMES, action="append", default=[])
    parser.add_argument("--task", action="append", help="instead of the frame's")
    parser.add_argument("--method", action="append", help="columns of the frame beside dense; all by default")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--budget", type=int, help="LoopServe's B; a sixteenth of --length by default")
    parser.add_argument("--samples", type=int, default=4, help="of each task")
    parser.add_argument("--limit", type=int, help="answer so many of each task's samples; a later run may answer more")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--together", type=int, default=1, help="samples that are answered at once (GPU)")
    parser.add_argument("--work", type=Path, default=Path("build/paper-tables"))
    parser.add_argument("--out", type=Path, default=Path("build/paper-tables.csv"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.model:
        config = EngineConfig(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            threads=args.threads,
            max_model_len=args.length + 64,
            enable_prefix_caching=True,  # policies that prefill alike share one prefill
        )
        work, budget = args.work / f"{Path(args.model).name}-{args.length}", args.budget or args.length // 16
        haystack = "prose" if args.file is None else f"file:{args.file}"
        with load(config, args.together) as llm:
            for name in args.frame:
                frame = FRAMES[name]
                tasks = tuple(args.task or frame.tasks)
                chosen = [
                    label for label in frame.policies if label == "dense" or label in (args.method or frame.policies)
                ]
                kind = tasks[0].partition(":")[0]
                many = "" if len(tasks) == 1 else len(tasks)
                text = "" if args.file is None or kind == "ruler" else f"-{args.file.stem}"
                data = prepare(
                    work,
                    tasks,
                    [args.length],
                    args.samples,
                    name=f"{kind}{many}{text}-{args.length}-n{args.samples}",
                    given=given_by(args.model, haystack="prose" if kind == "ruler" else haystack),
                )
                same = {"frame": name, "model": Path(args.model).name, "length": str(args.length)}
                same["text"] = args.file.stem if text and args.file else "made"
                for label in chosen:
                    policies = ["dense", filled(frame.policies[label], budget, args.length)]
                    folders = run_policies(
                        *(data, llm, config, policies, work / "results"),
                        oracle="none",
                        mix=True,
                        limit=args.limit,
                        together=args.together,
                        note=lambda line: print(line, file=sys.stderr, flush=True),
                    )
                    (group,) = load_groups(folders)
                    own = next(run.policy for run in group.runs if label == "dense" or run.policy != "dense")
                    join(args.out, rows_of(group, {own: label}, same))
    if args.page is not None:
        write_text(args.page, page(read_rows(args.out)))


if __name__ == "__main__":
    main()
