"""The page of paper_tables.py's rows: a table a frame, model and length, with paired intervals; the paper's beside."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from saccade.eval.stats import paired_difference

Row = dict[str, str]
FIELDS = ("frame", "model", "length", "text", "task", "method", "policy", "n", "pairs")
FIELDS += ("prefill_read", "prefill_seen", "decode_read", "decode_seen")
MODELS = {"smollm2": "S", "qwen2.5-coder": "Q", "gemma3-270m": "G"}
POSITIONS = ("begin", "middle", "end")

# Frame -> (title, what stands above, the paper's numbers).
SECTIONS = {
    "loopserve-table4": (
        "LoopServe, Table 4",
        "Conversations of three turns (summaries and few-shot: two). Owner turns, noise (a tenth of a turn's "
        "words, 0.15 for summaries) and the three positions of the question are LoopServe's section 4; texts "
        "are stretches of a novel. `mtsyn_qa` and `mtsyn_multidoc` ask for planted facts (F1), "
        "`mtsyn_summary` for the four facts of a source (LCS / |R|), `mtsyn_fewshot` for the kind of the "
        "novel's own questions (accuracy). Later turns see the model's own answers. B is a sixteenth of the "
        "length, and all options are scaled as it is to the paper's 1,024. What SnapKV and Ada-KV evict in one "
        "turn is gone in the next.",
        "Paper, means over its eleven sets, begin / middle / end, minus the base model (27.3 / 28.1 / 35.0 of"
        " Llama-3.1-8B, 29.4 / 26.4 / 35.4 of Qwen2.5-7B): SnapKV -3.0 / -2.9 / -0.7 and -3.5 / -3.8 / -1.4; "
        "Ada-KV -4.5 / -4.5 / -1.4 and -4.6 / -4.5 / -2.1; StreamingLLM -7.9 / -6.9 / -6.1 and -9.3 / -7.5 / "
        "-7.5; A-shape -7.9 / -8.4 / -11.3 and -7.9 / -4.9 / -9.6; Tri-shape -4.7 / -4.6 / -0.9 and -4.0 / "
        "-4.4 / -2.5; MInference -1.4 / -1.0 / -1.3 and -1.6 / -1.1 / 0.0; LoopServe +0.9 / +1.1 / +1.2 and "
        "+0.2 / -0.2 / +0.1.",
    ),
    "loopserve-fig7": (
        "LoopServe, Fig. 7: P, D and both",
        "The same frame's questions; P is sparse in prefill alone, D in decode alone.",
        "Paper: both together best or close on three sets (a picture).",
    ),
    "loopserve-fig8": (
        "LoopServe, Fig. 8: alpha",
        "The same frame's questions.",
        "Paper: 0.99 to 1 costs nothing, lower ones do (a picture); its main results are of 0.955.",
    ),
    "loopserve-fig9": (
        "LoopServe, Fig. 9: B",
        "The same frame's questions, around a sixteenth of the length.",
        "Paper: more helps up to 1,024 (a picture).",
    ),
    "loopserve-fig10": (
        "LoopServe, Fig. 10: n_d",
        "The same frame's summaries. As published the first 16 steps are dense, but for the last columns.",
        "Paper: 16 or 32 are the best balance, larger ones lose (a picture).",
    ),
    "flexprefill-table1": (
        "FlexPrefill, Table 1: RULER",
        "RULER's 13 tasks. Prefill alone is sparse, as in the paper; options in tokens are the paper's times "
        "length over 32K.",
        "Paper, Llama-3.1-8B at 4K / 8K / 16K / 32K: full attention 95.7 / 93.8 / 93.0 / 87.3, StreamingLLM "
        "95.4 / 94.0 / 74.8 / 48.6, MInference 95.7 / 94.0 / 93.3 / 86.5, FlexPrefill 95.4 / 93.5 / 94.7 / "
        "89.4.",
    ),
    "flexprefill-table2": (
        "FlexPrefill, Table 2: InfiniteBench's kinds of tasks",
        "Eight of its ten kinds over stretches of a novel with planted facts (`-t ibsyn:all`), in its layout "
        "and with its scores; Zh.QA needs a Chinese book and Code.Debug a body of code. Options as in Table "
        "1.",
        "Paper, Llama-3.1-8B, the same eight kinds: full attention 54.0, StreamingLLM 14.5, MInference 38.3, "
        "FlexPrefill 52.4.",
    ),
    "flexprefill-table4": (
        "FlexPrefill, Table 4: more baselines",
        "LM-Infinite is `streaming` in both phases with 10 first keys and a window of a half or a quarter of "
        "the context, as its 4K are of the paper's 8K and 16K; InfLLM is `infllm` at its published numbers "
        "times length over 32K. Neither moves positions, which both do for models that were trained on less.",
        "Paper, Llama-3-8B: LM-Infinite 54.8 at 8K and 38.9 at 16K, where full attention has 89.2 and 88.9; "
        "InfLLM 55.6 at 32K of 84.4; FlexPrefill 89.9, 90.4 and 82.2.",
    ),
}


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def pairs_of(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(own, dense's) score of every sample of ``rows``."""
    pairs = [pair.split(":") for row in rows for pair in row["pairs"].split(";") if pair]
    return [(float(own), float(base)) for own, base in pairs]


def difference(rows: Sequence[Row]) -> str:
    """Points of 100 minus dense's, with the paired 95 % interval."""
    pairs = pairs_of(rows)
    if not pairs:
        return "-"
    gone = paired_difference(*zip(*pairs))
    return f"{100 * gone.mean:+.1f} [{100 * gone.low:+.1f}, {100 * gone.high:+.1f}]"


def share(rows: Sequence[Row], phase: str) -> str:
    seen = sum(int(row[f"{phase}_seen"]) for row in rows)
    return f"{100 * sum(int(row[f'{phase}_read']) for row in rows) / seen:.0f} %" if seen else "-"


def table(rows: Sequence[Row]) -> str:
    """Tasks by methods, points of 100; then differences from dense, by position where there are three; what was read.
    ``rows`` of one frame, model, length and text."""
    methods = list(dict.fromkeys(["dense", *(row["method"] for row in rows)]))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = [f"| task | n | {' | '.join(methods)} |", "|---|---:" + "|---:" * len(methods) + "|"]
    by = {(row["task"], row["method"]): row for row in rows}
    for task in tasks:
        cells = [by.get((task, method)) for method in methods]
        scores = ["-" if one is None else f"{100 * fmean(own for own, _ in pairs_of([one])):.1f}" for one in cells]
        lines.append(f"| {task.partition(':')[2]} | {by[task, methods[0]]['n']} | {' | '.join(scores)} |")
    for name, wanted in groups(tasks).items():
        own = {method: [row for row in rows if row["method"] == method and row["task"] in wanted] for method in methods}
        count = len(pairs_of(own["dense"]))
        means = f"{100 * fmean(base for _, base in pairs_of(own['dense'])):.1f}"
        lines.append(f"| **{name}** | {count} | {means} | {' | '.join(difference(own[one]) for one in methods[1:])} |")
    for phase in ("prefill", "decode"):
        shares = [share([row for row in rows if row["method"] == method], phase) for method in methods]
        lines.append(f"| {phase}, keys read | | {' | '.join(shares)} |")
    return "\n".join(lines)


def groups(tasks: Sequence[str]) -> dict[str, list[str]]:
    """Tasks by what is pooled: each position, and all."""
    placed = {where: [task for task in tasks if task.endswith(f":{where}")] for where in POSITIONS}
    found = {f"minus dense, {where}": own for where, own in placed.items() if own}
    return {**(found if len(found) > 1 else {}), "minus dense, all": list(tasks)}


def page(rows: Sequence[Row]) -> str:
    """The whole page. Raises KeyError for a frame that has no section."""
    out = [
        "# The papers' tables of answers on real models",
        "S is SmolLM2-135M-Instruct, Q Qwen2.5-Coder-0.5B-Instruct, G Gemma-3-270M, bfloat16 on a CPU; Q from 8K on, "
        "and at LoopServe's Table 4, on an H200 from its `Q4_K_M` file. Points of 100; "
        "*minus dense* is paired over the same samples, with its 95 % interval, and n is the number of samples. They "
        "are few and short: what lies within an interval is not told apart. Scores of every sample: "
        "[paper-tables.csv](paper-tables.csv). [What the papers claim](../claims.md), judged; "
        "[figures of attention itself](paper-figures.md).",
        "```\npython benchmarks/paper_tables.py qwen2.5-coder -f dracula.txt --frame loopserve-table4 --length 2048 "
        "--samples 2 \\\n  --out docs/results/paper-tables.csv --page docs/results/paper-tables.md\n```",
        f"Other frames: {', '.join(f'`{name}`' for name in SECTIONS)}. On a GPU at 8K to 32K: `--length 32768 "
        "--device cuda --together 8 --samples 20`.",
    ]
    for frame, (title, said, paper) in SECTIONS.items():
        own = [row for row in rows if row["frame"] == frame]
        if not own:
            continue
        out += [f"## {title}", said, paper]
        for case in sorted({(list(MODELS).index(row["model"]), int(row["length"]), row["text"]) for row in own}):
            model, length, text = list(MODELS)[case[0]], case[1], case[2]
            some = [row for row in own if (row["model"], row["length"], row["text"]) == (model, str(length), text)]
            policies = dict.fromkeys(f"{row['method']} `{row['policy']}`" for row in some if row["method"] != "dense")
            out += [
                f"### {title.partition(':')[0]}: {MODELS[model]}, {length // 1024}K, {text}",
                table(some),
                "; ".join(policies),
            ]
    return "\n\n".join(out) + "\n"
