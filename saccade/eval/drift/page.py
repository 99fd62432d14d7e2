"""The tables of drift as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.eval.drift.recommend import Advice, said
from saccade.eval.drift.rows import DENSE, ROUNDING, Row

HEAD = (
    *("policy", "KL to dense [95 %]", "agrees", "perplexity", "minus dense, nats [95 %]"),
    *("kept", "worst head", "least", "kept, prefill", "density", "density, prefill", "reads"),
)


def table(rows: Sequence[Row]) -> str:
    """One line a policy; dense and the rounding of bfloat16 first."""
    first = [row for row in rows if row.id in (DENSE, ROUNDING)]
    others = sorted((row for row in rows if row.id not in (DENSE, ROUNDING)), key=lambda row: row.kl.mean)
    return _markdown(HEAD, [_cells(row) for row in (*first, *others)])


def layers_table(rows: Sequence[Row]) -> str:
    """True weight kept in decode, by layer, the mean over heads and steps; without layers of a window of their own."""
    measured = [row for row in rows if row.id != DENSE and _kept(row, "decode") is not None]
    if not measured:
        return ""
    names = sorted({int(layer) for row in measured for layer in _kept(row, "decode")["layers"]})
    lines = []
    for row in measured:
        weights = _kept(row, "decode")["layers"]
        lines.append([_code(row.id), *(_three(weights.get(str(layer))) for layer in names)])
    return _markdown(("policy", *map(str, names)), lines)


def page(config: Mapping[str, Any], rows: Sequence[Row], advice: Advice) -> str:
    """The whole report."""
    text, machine = config["text"], config["machine"]
    parts = [
        "# Drift from dense attention",
        f"Model {config['model']['name']} in {config['model']['dtype']}; {text['name']}: {text['context']} tokens of "
        f"context, {text['tokens']} forced. Machine: {machine['processor']}, {machine['cores']} cores.",
        table(rows),
        "KL in nats, mean over the forced tokens; intervals draw stretches of tokens, the same for all. Kept: share of "
        "the true attention weight on keys that were read in decode, over all heads and steps; worst head: its mean "
        "over steps; least: one head in one step. Reads: keys and values read, and keys scored exactly to choose them, "
        "over what dense reads, the mean of prefill and decode.",
        *notes(rows),
        advice_line(advice),
    ]
    by_layer = layers_table(rows)
    if by_layer:
        parts += ["## True weight kept in decode, by layer", by_layer]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def notes(rows: Sequence[Row]) -> list[str]:
    """Sentences on policies: estimates that measured weights contradict, and what ran otherwise than asked."""
    said = [f"{row.id}: {row.record['contradiction']}." for row in rows if row.record.get("contradiction")]
    return said + [f"{row.id}: {note}." for row in rows for note in row.record.get("notes", ())]


def advice_line(advice: Advice) -> str:
    return f"Recommendation: {advice.reason}"


def _cells(row: Row) -> list[str]:
    own = row.id != DENSE
    decode, prefill = _kept(row, "decode"), _kept(row, "prefill")
    return [
        _code(row.id) + (" (oracle)" if row.oracle else ""),
        said(row.kl) if own else "0",
        f"{100 * row.agree.mean:.1f} %",
        f"{row.perplexity:.3f}",
        f"{row.nll.mean:+.4f} [{row.nll.low:+.4f}, {row.nll.high:+.4f}]" if own else "–",
        _three(decode and decode["mean"]),
        _three(decode and decode["worst_head"]["mean"]),
        _three(decode and decode["least"]["weight"]),
        _three(prefill and prefill["mean"]),
        _three(_part(row, "decode", "density")),
        _three(_part(row, "prefill", "density")),
        _three(row.reads),
    ]


def _part(row: Row, phase: str, name: str) -> Any:
    return row.record.get(phase, {}).get(name)


def _kept(row: Row, phase: str) -> Any:
    return _part(row, phase, "kept")


def _three(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _code(text: str) -> str:
    return text if text in (DENSE, ROUNDING) else f"`{text}`"


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *(["---:"] * (len(head) - 1))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines]) + "\n"
