"""What storing keys and values in fewer bits does to answers: the same samples of ``saccade eval`` under each format, a
row a task, paired with the first format's. A killed run goes on where it was; ``--report`` makes the rows of what it
has answered, without a model.

    python benchmarks/kv_tasks.py --model build/real/smollm2 --task natural:questions --task ruler:niah_single_1 \\
        --length 1024 --samples 50 --workers 2

A sample's score is the mean of its questions'; intervals draw samples, so questions over one text stay together.
"""

from __future__ import annotations

import argparse
import gc
from collections import defaultdict
from pathlib import Path

import torch

from saccade.engine.settings.config import EngineConfig
from saccade.eval.results import PREDICTIONS, SCORES, slug
from saccade.eval.runner import given_by, prepare, run_policies
from saccade.eval.samples import read_jsonl
from saccade.eval.score import score_folder
from saccade.eval.setting import computed, load
from saccade.eval.stats import paired_difference

Scores = dict[str, tuple[str, float, list[str]]]  # task, score and answers of a sample by its id


TURNS = {"rotated": True, "as-is": False}  # kv_rotate, by what follows a format


def config_of(asked: argparse.Namespace, format: str) -> EngineConfig:
    """Of an engine that stores keys and values as ``format`` says, the rest as asked on the command line. Raises
    SystemExit for a turn that is none of TURNS."""
    same = {name: getattr(asked, name) for name in ("model", "dtype", "threads", "device", "kv_memory")}
    kv_dtype, *turn = format.split("+")
    if any(one not in TURNS for one in turn):
        raise SystemExit(f"--formats {format}: behind '+' stands one of {', '.join(TURNS)}")
    return computed(EngineConfig(**same, kv_dtype=kv_dtype, kv_rotate=TURNS[turn[0]] if turn else None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", action="append", required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=50, help="of each task")
    parser.add_argument(
        "--formats",
        default="auto,int8",
        help="values of kv_dtype, +rotated or +as-is behind where kv_rotate is not its default: auto+rotated rounds as "
        "many bits otherwise; others are held against the first",
    )
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--haystack", default="prose", help="as saccade eval's")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--together", type=int, default=1, help="samples of a worker that are answered at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-memory", default="512MiB", help="of each engine; more for samples that share steps")
    parser.add_argument("--limit", type=int, help="the first so many samples of each task")
    parser.add_argument("--out", type=Path, default=Path("eval-results/kv"))
    parser.add_argument("--report", action="store_true", help="answer nothing: the rows of what lies in --out")
    asked = parser.parse_args()
    name = f"{Path(asked.model).name}-{asked.length}-" + "+".join(task.replace(":", "-") for task in asked.task)
    data = asked.out / f"{name}.jsonl"
    if not asked.report:
        given = given_by(asked.model, haystack=asked.haystack)
        data = prepare(asked.out, asked.task, [asked.length], asked.samples, name=name, given=given)
    found: dict[str, Scores] = {}
    for format in asked.formats.split(","):
        folder = finished(asked, data, format) if asked.report else answered(asked, data, format)
        if folder is None:
            continue
        give_back()
        found[format] = scores(folder)
        if len(found) > 1:
            report(*list(found)[:: len(found) - 1], found)
        else:
            head(asked, format)
    if not found:
        raise SystemExit(f"{asked.out} holds no answers to {data.name}")


def answered(asked: argparse.Namespace, data: Path, format: str) -> Path:
    """The folder of answers under ``format``. Its engine goes as this returns: the next one's keys take its room."""
    config = config_of(asked, format)
    with load(config, asked.together) as llm:
        (folder,) = run_policies(
            data,
            llm,
            config,
            [asked.policy],
            asked.out,
            limit=asked.limit,
            oracle="none",
            workers=asked.workers,
            together=asked.together,
        )
    return folder


def finished(asked: argparse.Namespace, data: Path, format: str) -> Path | None:
    """The folder of what was answered under ``format``, scored; None where there is none."""
    head = f"{slug(Path(asked.model).name)}__{slug(asked.policy)}__"
    tail = f"__{slug(data.stem)}" + "".join(f"__{slug(part)}" for part in format.split("+") if part != "auto")
    folders = [one for one in asked.out.glob(f"{head}*{tail}") if (one / PREDICTIONS).is_file()]
    if not folders:
        return None
    score_folder(folders[0], data)
    return folders[0]


def give_back() -> None:
    """What an engine held that is gone: memory of the device is kept for this process else."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def scores(folder: Path) -> Scores:
    said = {row["id"]: [turn["prediction"] for turn in row["turns"]] for row in read_jsonl(folder / PREDICTIONS)}
    rows = read_jsonl(folder / SCORES)
    return {row["id"]: (row["task"], row["score"], said[row["id"]]) for row in rows if row["score"] is not None}


def head(asked: argparse.Namespace, first: str) -> None:
    print(f"{asked.model}, {asked.dtype}, {asked.device}, {asked.policy}, {asked.length} tokens; points of 100")
    print(f"| task | questions | samples | {first} | kv_dtype | points | minus {first} [95 %] | better, worse | same |")
    print("|---|---:|---:|---:|---|---:|---|---|---:|", flush=True)


def report(first: str, other: str, found: dict[str, Scores]) -> None:
    """A row a task. ``same``: answers that are ``first``'s to the letter."""
    ids = [one for one in found[first] if one in found[other]]
    tasks = defaultdict(list)
    for one in ids:
        tasks[found[first][one][0]].append(one)
    for task, group in [*tasks.items(), *([("all", ids)] if len(tasks) > 1 else [])]:
        base, ours = ([100 * found[name][one][1] for one in group] for name in (first, other))
        gap = paired_difference(ours, base)
        better, worse = (sum(sign * (a - b) > 1e-9 for a, b in zip(ours, base)) for sign in (1, -1))
        pairs = [pair for one in group for pair in zip(found[first][one][2], found[other][one][2])]
        same = 100 * sum(a == b for a, b in pairs) / len(pairs)
        means = [sum(one) / len(one) for one in (base, ours)]
        print(
            f"| {task} | {len(pairs)} | {len(group)} | {means[0]:.1f} | {other} | {means[1]:.1f} | "
            f"{gap.mean:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}] | {better}, {worse} | {same:.0f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
