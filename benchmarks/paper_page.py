"""The page of paper_figures.py's rows: a table a figure, the models side by side, means over texts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

Row = dict[str, str]

MODELS = {"smollm2": "S", "qwen2.5-coder": "Q", "gemma3-270m": "G"}

# Figure -> (title, what stands above the table).
SECTIONS = {
    "LFPS Fig. 2a": (
        "LFPS, Fig. 2a: what history holds",
        "Of a step's heaviest 2 % of the keys, those that were among the heaviest 2 % of the step before, or of one of "
        "16 steps before, at the same position or at the same distance; and the share of the keys that so many "
        "candidates are. Paper: 85 % overlap, neighbours (-1, 1, 2) add about 3 points.",
    ),
    "LFPS Fig. 2b": ("LFPS, Fig. 2b: heavy keys lie together", "Paper: 50 to 80 % of the heaviest 2 %."),
    "LFPS eq. 2": (
        "LFPS, eq. 2 and Fig. 2a: overlap with exact top-k",
        "Of the best 2 % of the keys behind the first four, those that a method read; heads that it bypassed are left "
        "out. Paper: 85 to 88 % by LFPS, Quest below 50 %. The defaults read at least 256 keys.",
    ),
    "LFPS eq. 2 by definition": (
        "LFPS, eq. 2 by what is counted",
        "To the letter. The first four keys and the row's own are always read, and count among the best 2 % of all "
        "keys; eq. 2's are of what the paper offloads, without the first. Tables know most in the first steps, from "
        "the prompt.",
    ),
    "LFPS Table 3": (
        "LFPS, Table 3: heads that rest on their sinks",
        "Share of heads and steps. Paper: 12 % at epsilon 0.85.",
    ),
    "LFPS Fig. 2c": (
        "LFPS, Fig. 2c: what may stand for the rest",
        "Relative L2 error of a head's output beside dense attention's. Heads that rest: the first four keys hold more "
        "than 0.85. Paper: with the mean of the rest the error is smaller than by sinks alone.",
    ),
    "LFPS Fig. 6": ("LFPS, Fig. 6: patterns are not exact", "Paper: a picture of the heaviest 5 %."),
    "LFPS Fig. 7": (
        "LFPS, Fig. 7: likeness of patterns and sinks",
        "Weights behind the first four keys: of neighbouring steps; and summed over a head's steps whose first key's "
        "weight lies in one interval of 0.05, of two intervals. Paper: a marked shift at 0.9.",
    ),
    "LFPS Fig. 8": (
        "LFPS, Fig. 8: outputs of heads that rest",
        "Paper: a picture of outputs of heads at steps of one layer, those of sparse heads alike and the sink's value.",
    ),
    "PrHS CIS": ("PrHS: how queries turn", "Of neighbouring steps of one head; rotated queries."),
    "PrHS Table VI": (
        "PrHS, Table VI: search ratio",
        "Share of heads and steps that search, tau 0.8, by whose keys are shared. Paper, LLaMA2-7B at s = 8, 16, 20: "
        "0.164, 0.087, 0.062.",
    ),
    "PrHS Fig. 2": (
        "PrHS, Fig. 2: clusters of critical keys",
        "Neighbouring steps whose queries have a cosine above 0.8; best 64 keys; a cluster's keys are at most 2 apart. "
        "Paper: a picture; cluster-level overlap remains large.",
    ),
    "PrHS Fig. 4": (
        "PrHS, Fig. 4: dilation",
        "Of a step's best 128 keys, those in the set of a step before, as it was and dilated; sizes beside the set's "
        "own. The paper shows two clusters, which dilation covers completely.",
    ),
    "PrHS Fig. 8": (
        "PrHS, Fig. 8: keys that dilation adds",
        "Keys that sharing heads read, by the share of k that is dilated: among as many best ones as the budget, and "
        "others. Budgets of 128 at 1K and 512 at 4K; CIS as printed. Paper: few for moderate m.",
    ),
    "LoopServe Obs. 1": ("LoopServe, Observation 1", "Paper: a tenth of the lines holds about 90 %."),
    "FlexPrefill Fig. 3 and 10": (
        "FlexPrefill, Fig. 3 and 10: density by length",
        "Pairs that a prefill reads at gamma 0.95, blocks of 128, no minimum budget. Paper: longer inputs are sparser, "
        "heads differ.",
    ),
    "FlexPrefill Fig. 7": (
        "FlexPrefill, Fig. 7: Jensen-Shannon distance",
        "Between pooled and true block weights; below tau = 0.1 a head is query-aware. The natural log's, 0 to 0.83.",
    ),
    "FlexPrefill Fig. 8": (
        "FlexPrefill, Fig. 8: query-aware heads",
        "Share of heads at tau 0.1. Paper: few, mainly in the first layer.",
    ),
    "PrHS Table VI perplexity": (
        "PrHS, Table VI: perplexity under PSAW and ETF",
        "Times dense's, over the last quarter of each text, which ETF never freezes. Paper, LLaMA-2-7B on WikiText: "
        "6.12 and 6.11 under PSAW, 6.16 under ETF; dense is not printed.",
    ),
}
# Figures whose rows differ where a model decodes its own answers.
OWN = (
    "LFPS Fig. 2a",
    "LFPS eq. 2",
    "LFPS eq. 2 by definition",
    "LFPS Table 3",
    "PrHS CIS",
    "PrHS Table VI",
)
BY_METHOD = {
    "PrHS Fig. 1b": (
        "PrHS, Fig. 1b: output error at equal budgets",
        "Relative L2 error of a head's output, the same queries for all. Paper: post-hoc methods err most, its own are "
        "close to the oracle. LFPS to the letter returns a mean value for heads that it bypasses.",
    ),
    "PrHS Fig. 1a": ("PrHS, Fig. 1a: error of attention", "L1 distance of the weights: twice the mass dropped."),
    "PrHS Fig. 1c keys read": ("PrHS, Fig. 1c: keys read", "Of those visible; the error beside it is Fig. 1b's."),
    "PrHS Fig. 1c keys scored": (
        "PrHS, Fig. 1c: keys scored to choose",
        "Exact products and products with stand-ins, a head and step, of the keys visible.",
    ),
    "PrHS eq. 8 beyond the oracle's": (
        "PrHS, eq. 9: mass dropped beyond the oracle's",
        "Beyond what as many best keys drop.",
    ),
    "PrHS eq. 8 bias": (
        "PrHS, eq. 7: posterior bias",
        "Total variation distance between true weights and what a method takes for them: accumulated weights (H2O), "
        "the last rows' (SnapKV, Ada-KV), bounds of pages (Quest), a few channels (Double Sparsity), the weights of "
        "the step or query whose keys are shared, equal ones (StreamingLLM). Others have none.",
    ),
    "PrHS eq. 8 dropped at most (P1)": (
        "PrHS, eq. 8 (P1): the bound",
        "On the dropped mass: the oracle's and twice the bias.",
    ),
    "PrHS eq. 8 says nothing (P2)": (
        "PrHS, P2: where the bound says nothing",
        "Share of heads and steps in which the bound on the dropped mass is 1 or more.",
    ),
    "PrHS eq. 8 logits off by at most (QAA)": (
        "PrHS, QAA: the sup-norm of logits",
        "Half the largest error of a log-weight; a bias is at most this, so above 1 it says nothing.",
    ),
}


def page(rows: Sequence[Row]) -> str:
    """Markdown. SystemExit without rows."""
    if not rows:
        raise SystemExit("no rows: measure some first")
    text = [r for r in rows if r["rows"] == "text"]
    lengths = sorted({int(row["length"]) for row in text})
    ran = "; ".join(f"{length:,} tokens of {_texts(text, length)}" for length in lengths)
    out = [
        "# The papers' figures on real models",
        "S is SmolLM2-135M-Instruct, Q Qwen2.5-Coder-0.5B-Instruct, G Gemma-3-270M; all layers whose attention sees "
        "everything (of G three of 18), all heads, float32, truth in float64. The last 96 tokens are decode steps of "
        "the text itself.\nMeans over layers, heads, steps and texts "
        f"(`saccade`: this repository's code): {ran}.\n"
        "Deciles, single texts: [paper-figures.csv](paper-figures.csv). [What the papers claim](../claims.md), judged.",
        "```\npython benchmarks/paper_figures.py smollm2 -f dracula.txt -f pride-and-prejudice.txt -f saccade "
        "--length 1024 \\\n  --out docs/results/paper-figures.csv --page docs/results/paper-figures.md\n```\n\n"
        "With `--windows` it measures the perplexities.",
    ]
    for figure, (title, said) in SECTIONS.items():
        if any(row["figure"] == figure for row in text):
            ran = [_texts([r for r in text if r["figure"] == figure], length) for length in lengths]
            said = " ".join([said, *(f"Texts: {one}." for one in ran if "(" in one)])
            out += [f"## {title}", said, table([r for r in text if r["figure"] == figure and "layer" not in r["what"]])]
            layers = by_layer([r for r in text if r["figure"] == figure and ", layer " in r["what"]])
            out += [layers] if layers else []
            own = [r for r in rows if r["figure"] == figure and r["rows"] == "own"]
            if own and figure in OWN:
                out += ["Of the model's own greedy answers:", table(own)]
    for figure, (title, said) in BY_METHOD.items():
        own = [r for r in text if r["figure"] == figure]
        if own:
            out += [f"## {title}", said, table(own, "method")]
    return "\n\n".join(out) + "\n"


def _texts(rows: Sequence[Row], length: int) -> str:
    """The texts of ``length`` tokens; where not every model has all, by model."""
    models: dict[str, list[str]] = {}
    for row in rows:
        if row["length"] == str(length) and row["text"] not in models.setdefault(MODELS[row["model"]], []):
            models[MODELS[row["model"]]].append(row["text"])
    if len({tuple(sorted(own)) for own in models.values()}) == 1 and len(models) == len(MODELS):
        return ", ".join(sorted(next(iter(models.values()))))
    return ", ".join(f"{' and '.join(sorted(own))} ({model})" for model, own in sorted(models.items()))


def table(rows: Sequence[Row], first: str = "") -> str:
    """One row for each ``what``, in the order of the data, one column for each model and length."""
    cases = sorted({(int(row["length"]), list(MODELS).index(row["model"])) for row in rows})
    names = list(MODELS)
    heads = [f"{MODELS[names[model]]}, {length // 1024}K" for length, model in cases]
    lines = [f"| {first} | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for what in dict.fromkeys(row["what"] for row in rows):
        cells = [value(rows, what, names[model], length) for length, model in cases]
        lines.append(f"| {f'`{what}`' if what.startswith('dense') else what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def value(rows: Sequence[Row], what: str, model: str, length: int) -> str:
    """The mean over texts, as it is written in tables; a dash where nothing was measured."""
    found = [
        float(row["mean"])
        for row in rows
        if (row["what"], row["model"], row["length"]) == (what, model, str(length)) and row["mean"]
    ]
    if not found:
        return "-"
    return f"{fmean(found):.4f}" if what.startswith("dense") else shown(fmean(found))


def shown(number: float) -> str:
    """Three digits behind the point, fewer of large numbers; perplexities beside dense's need four."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.3f}"


def by_layer(rows: Sequence[Row]) -> str:
    """By model and length, the layers' means in order."""
    lines = []
    for length, model in sorted({(int(r["length"]), r["model"]) for r in rows}, key=lambda one: (one[0], one[1])):
        own = [r for r in rows if (int(r["length"]), r["model"]) == (length, model)]
        names = sorted({r["what"] for r in own})
        means = [fmean(float(r["mean"]) for r in own if r["what"] == name) for name in names]
        numbers = ", ".join(f"{int(name[-2:])}: {mean:.2f}" for name, mean in zip(names, means) if mean >= 0.005)
        lines.append(f"* {MODELS[model]}, {length // 1024}K, by layer (from 0): {numbers or 'none'}")
    return "\n".join(lines)
