"""What sparse attention costs a pretrained model on tasks that it can answer: ten methods at three settings each.

    python benchmarks/real_models.py qwen2.5-coder --length 4096 [--device cuda --together 16] [--family long --middle]

Three families of samples, each fitted to ``--length`` tokens of the model: a fact in prose, RULER's thirteen tasks, and
long answers whose end can be checked (docs/evaluation.md). Prompts of decode methods are prefilled densely, the answer
is decoded sparsely (protocol A; ``--protocol B`` decodes the question too). Every sample is paired with dense
attention's, and tasks that dense itself does to less than half are left out (``--all`` keeps them). A killed run goes
on where it was; the table is written beside the results after every policy.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from saccade.engine.settings.config import EngineConfig
from saccade.eval.runner import given_by, prepare, run_policies
from saccade.eval.setting import load
from saccade.eval.stats import Interval
from saccade.eval.summary import Cell, Group, load_groups
from saccade.eval.weak import dense_score
from saccade.files import write_text
from saccade.methods.policy import Policy

FAMILIES = {"facts": (("natural:facts",), 50), "ruler": (("ruler:all",), 4), "long": (("long:all",), 13)}
SHARES, COVERED = (0.05, 0.1, 0.25), (0.9, 0.95, 0.98)
BASELINES = ("streaming(window={keys})", "psa(rank=cuboid, epsilon=0.95)", "psa(rank=cuboid, rest=min, epsilon=0.95)")


def policies(length: int, middle: bool = False) -> list[str]:
    """Nine methods and an oracle at three settings each, or at the ``middle`` one; then, at one, baselines and the
    forms that PSA's paper has."""
    keys = [max(64, round(share * length / 32) * 32) for share in SHARES]
    dials = [
        [f"psa(epsilon={share})" for share in COVERED],
        [f"lfps(k={share})" for share in (0.02, 0.05, 0.1)],
        [f"cis(k={max(16, count - 80)})" for count in keys],
        [f"arkvale(budget={max(192, count)})" for count in keys],
        [f"quest(budget={count})" for count in keys],
        [f"double_sparsity(k={share}, source=prompt)" for share in SHARES],
        [f"snapkv(capacity={count}, window=32)" for count in keys],
        [f"flexprefill(gamma={share}, min_budget=256)" for share in COVERED],
        [f"topp(p={share})" for share in COVERED],
        [f"twilight(p={share})" for share in COVERED],
    ]
    rows = [text for dial in dials for text in (dial[1:2] if middle else dial)]
    return list(dict.fromkeys([*rows, *(text.format(keys=keys[-1]) for text in BASELINES)]))


def table(groups: dict[str, list[Cell]], rows: list[str], left_out: dict[str, list[str]]) -> str:
    """A row a policy: for each family score and difference from dense with its interval; the densities of all."""
    heads = ["policy", *(f"{name}, minus dense [95 %]" for name in groups), "prefill density", "decode density"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    cells = {name: {cell.run.policy: cell for cell in own} for name, own in groups.items()}
    for policy in ["dense", *rows]:
        own = [found.get(Policy.parse(policy).text) for found in cells.values()]
        if not any(own):
            continue
        scores = ["" if cell is None else _score(cell, policy) for cell in own]
        densities = [_density([cell for cell in own if cell is not None], phase) for phase in ("prefill", "decode")]
        lines.append(f"| `{policy}` | {' | '.join([*scores, *densities])} |")
    said = [f"{name}: {', '.join(tasks)}" for name, tasks in left_out.items() if tasks]
    note = f"\nLeft out, as dense does less than half of them: {'; '.join(said)}.\n" if said else ""
    return "\n".join(lines) + "\n" + note


def answerable(group: Group, keep_all: bool) -> tuple[list[Cell], list[str]]:
    """Every run over the tasks that dense does to half or more, and the other tasks."""
    dense = next(found for run in group.runs if run.policy == "dense" and (found := dense_score(run)))
    low = {} if keep_all else dense.low
    cells = [group.cell(run, lambda row: row["task"] not in low) for run in group.runs]
    return [cell for cell in cells if cell.n], [f"{task} ({100 * score:.0f})" for task, score in low.items()]


def _score(cell: Cell, policy: str) -> str:
    score = "-" if cell.score is None else f"{100 * cell.score:.1f}"
    difference: Interval | None = cell.difference
    if policy == "dense" or difference is None:
        return f"{score} (n={cell.n})"
    return f"{score}, {100 * difference.mean:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"


def _density(cells: list[Cell], phase: str) -> str:
    """Over all families: attended over causal pairs."""
    causal = sum(cell.total(phase, "keys_causal") or 0 for cell in cells)
    return f"{100 * sum(cell.total(phase, 'keys_attended') or 0 for cell in cells) / causal:.1f} %" if causal else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--samples", type=float, default=1.0, help="of the numbers of samples, a share")
    parser.add_argument("--policy", action="append", help="instead of all")
    parser.add_argument("--middle", action="store_true", help="each method at its middle setting alone")
    parser.add_argument("--all", action="store_true", help="also tasks that dense does to less than half")
    parser.add_argument("--protocol", default="A")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--together", type=int, default=1, help="samples that are answered at once (GPU)")
    parser.add_argument("--kv-memory", type=float, help="GiB")
    parser.add_argument("--out", type=Path, default=Path("build/real-tables"))
    args = parser.parse_args()
    options = {"kv_memory": int(args.kv_memory * 2**30)} if args.kv_memory else {}
    config = EngineConfig(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        max_model_len=args.length + 64,
        enable_prefix_caching=True,  # policies that prefill alike share one prefill
        **options,
    )
    rows = args.policy or policies(args.length, args.middle)
    out = args.out / f"{Path(args.model).name}-{args.length}"
    found: dict[str, list[Cell]] = {}
    left_out: dict[str, list[str]] = {}
    with load(config, args.together) as llm:
        date = datetime.date.today().isoformat()
        head = f"{args.model}, {args.length} tokens, {args.dtype} on {llm.model.device}, {date}\n\n"
        for family in args.family or FAMILIES:
            tasks, samples = FAMILIES[family]
            count = max(1, round(samples * args.samples))
            name = f"{family}-{args.length}-n{count}"
            data = prepare(out, tasks, [args.length], count, name=name, given=given_by(args.model))
            folders: list[Path] = []
            for policy in ["dense", *rows]:
                folders += run_policies(
                    data,
                    llm,
                    config,
                    [policy],
                    out / "results",
                    protocol=args.protocol,
                    oracle="none",
                    together=args.together,
                    note=lambda text: print(text, file=sys.stderr, flush=True),
                )
                (group,) = load_groups(folders)
                found[family], left_out[family] = answerable(group, args.all)
                write_text(out / f"table-{'-'.join(found)}.md", head + table(found, rows, left_out))
    print((out / f"table-{'-'.join(found)}.md").read_text())


if __name__ == "__main__":
    main()
