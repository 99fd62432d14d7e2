"""What ``saccade tune`` prints."""

from __future__ import annotations

from saccade.eval.tune.study import Found
from saccade.eval.tune.trial import Tried

HEAD = ("policy", "KL to dense", "agrees", "keys read", "of dense's time", "")


def table(found: Found) -> str:
    """A line a policy, in the order in which they were tried, as Markdown; bfloat16's rounding first."""
    rows: list[tuple[str, ...]] = []
    for name, agreed in found.roundings.items():
        rows.append(("bfloat16", "-", f"{100 * agreed:.1f} %", "-", "-", f"rounding ({name})"))
    rows += [_cells(one, one.policy == found.tuned.policy) for one in found.tried]
    lines = [HEAD, ("---", "---:", "---:", "---:", "---:", "---"), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(one: Tried, kept: bool) -> tuple[str, ...]:
    share = f"{100 * one.seconds / one.dense_seconds:.0f} %" if one.dense_seconds else "-"
    said = "kept" if kept else "within the bounds" if one.why is None else f"no: {one.why}"
    return (
        f"`{one.policy}`",
        f"{one.kl:.4f}",
        f"{100 * one.agree:.1f} %",
        f"{100 * one.density:.0f} % of the {one.phase}",
        share,
        said,
    )
