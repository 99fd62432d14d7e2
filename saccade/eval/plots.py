"""The report's figures, as SVG text: methods differ by marker and line as well as by colour."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from saccade.eval.figures import new_figure, styled
from saccade.eval.summary import Cell, Group, Run, depth_table, position_scores

# Okabe and Ito's colours, which eyes of every kind tell apart; dense is black, the oracle grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8A6D00", "#5B3FA0")
_MARKERS = ("s", "^", "D", "v", "P", "X", "h", "p")
_PLACES: dict[str, dict[str, Any]] = {  # of a question in its turn
    "begin": {"marker": "<", "color": "#0072B2"},
    "middle": {"marker": "o", "color": "#111111", "markerfacecolor": "none"},
    "end": {"marker": ">", "color": "#D55E00"},
}
_LINES = {"A": "-", "B": "--", "C": "-", "D": ":"}  # of a protocol
TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "svg.hashsalt": "saccade",
    "svg.fonttype": "path",
    "figure.dpi": 100,
}


def frontier(group: Group) -> str | None:
    """Score against density, a panel for each phase in which any policy is sparse; bars are 95 % intervals."""
    looks = _looks(group.runs)
    panels = [
        (phase, shown)
        for phase, letters in (("decode", "ABD"), ("prefill", "CD"))
        if (shown := [cell for cell in group.overall if _sparse(cell, letters) and cell.density(phase) and cell.n])
    ]
    if not panels:
        return None
    dense = next((cell.score for cell in group.overall if cell.run.policy == "dense"), None)
    with styled(STYLE):
        figure = new_figure(figsize=(6.4 * len(panels), 4.6))
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)
        for axis, (phase, cells) in zip(axes[0], panels):
            if dense is not None:
                axis.axhline(100 * dense, color="#111111", linewidth=1, linestyle="--")
                axis.annotate("dense", (0.01, 100 * dense), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
            for curve in dict.fromkeys((cell.run.method, cell.run.protocol) for cell in cells):
                points = sorted(_point(cell, phase) for cell in cells if (cell.run.method, cell.run.protocol) == curve)
                x, y, below, above = zip(*points)
                look = {"linewidth": 1.2, "capsize": 2.5, "linestyle": _LINES[curve[1]], **looks[curve[0]]}
                axis.errorbar(x, y, yerr=[below, above], label=f"{curve[0]} ({curve[1]})", **look)
            sparsest = min(cell.density(phase) or 1.0 for cell in cells)
            ticks = [tick for tick in TICKS if tick >= sparsest / 2.1]
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
            axis.set_xticks([], minor=True)
            axis.set_xlim(0.85 * min(ticks[0], sparsest), 1.15)
            axis.set_ylim(_floor(cells, dense), 100 + 0.08 * (100 - _floor(cells, dense)))
            axis.set_title(f"{phase}: keys read, of those dense reads")
            axis.set_xlabel(f"measured {phase} density (log scale)")
            axis.grid(axis="both", color="#e6e6e6", linewidth=0.7)
            axis.set_axisbelow(True)
        axes[0][0].set_ylabel("score")
        _legend(figure, axes[0])
        return svg(figure)


def _floor(cells: Sequence[Cell], dense: float | None) -> float:
    """Where the axis of scores begins: a little below the lowest interval, so that small differences can be seen."""
    intervals = [cell.score_interval.low for cell in cells if cell.score_interval]
    lowest = 100 * min(*intervals, 1.0 if dense is None else dense, 1.0)
    return -4.0 if lowest < 20 else 5 * (lowest // 5) - 5


def _sparse(cell: Cell, letters: str) -> bool:
    return cell.run.protocol in letters and cell.run.policy != "dense"


def _point(cell: Cell, phase: str) -> tuple[float, float, float, float]:
    """(density, score, how far its interval reaches below and above)."""
    interval = cell.score_interval
    assert interval is not None
    below, above = interval.mean - interval.low, interval.high - interval.mean
    return cell.density(phase) or 1.0, 100 * interval.mean, 100 * max(0.0, below), 100 * max(0.0, above)


def depth_maps(group: Group, bins: int = 10) -> str | None:
    """Score by depth of what is asked for and length, a panel a policy; every cell carries its number."""
    tables = [(run, table) for run in group.runs if (table := depth_table(run, bins))]
    if not tables:
        return None
    lengths = sorted({length for _, table in tables for length, _ in table})
    columns = min(3, len(tables))
    rows = -(-len(tables) // columns)
    with styled(STYLE):
        height = 0.9 + 0.34 * len(lengths)
        figure = new_figure(figsize=(4.3 * columns, height * rows + 0.4))
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(tables) :]:
            axis.axis("off")
        for at, (axis, (run, table)) in enumerate(zip(axes.flat, tables)):
            values = [[table.get((length, depth)) for depth in range(bins)] for length in lengths]
            axis.imshow(
                [[float("nan") if value is None else value for value in line] for line in values],
                cmap="cividis",
                vmin=0,
                vmax=1,
                aspect="auto",
            )
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    text = "–" if value is None else f"{100 * value:.0f}"
                    dark = value is not None and value < 0.55
                    axis.text(column, row, text, ha="center", va="center", fontsize=7.5, color="w" if dark else "k")
            axis.set_yticks(range(len(lengths)), [in_k(length) for length in lengths])
            axis.set_xticks(range(bins), [f"{100 * depth // bins}" for depth in range(bins)])
            axis.tick_params(length=0, labelsize=8)
            for spine in axis.spines.values():
                spine.set_visible(False)
            title = f"{run.policy} ({run.protocol})".replace("+", "+\n").replace(", decode", ",\ndecode")
            axis.set_title(title, fontsize=8.5)
            if at // columns == rows - 1 or at + columns >= len(tables):
                axis.set_xlabel("depth in the context, % (bin's begin)", fontsize=8)
        figure.tight_layout(h_pad=1.4, w_pad=1.6)
        return svg(figure)


def positions(group: Group) -> str | None:
    """Score minus dense by where the question stands, a line a policy; None unless the data asks in more than one
    place."""
    dense = next((position_scores(run) for run in group.runs if run.policy == "dense"), {})
    shown = [(run, scores) for run in group.runs if run.policy != "dense" and len(scores := position_scores(run)) > 1]
    if len(dense) < 2 or not shown:
        return None
    with styled(STYLE):
        figure = new_figure(figsize=(9.5, 1.5 + 0.36 * len(shown)))
        axis = figure.subplots()
        axis.axvline(0, color="#111111", linewidth=1, linestyle="--")
        for row, (_, scores) in enumerate(shown):
            found = {name: 100 * (scores[name] - dense[name]) for name in dense if name in scores}
            axis.plot([min(found.values()), max(found.values())], [row, row], color="#b5b5b5", linewidth=3, zorder=1)
            for name, value in found.items():
                label = f"{name} (dense {100 * dense[name]:.0f})" if row == 0 else None
                axis.plot([value], [row], linestyle="none", markersize=8, label=label, zorder=2, **_PLACES[name])
        axis.set_yticks(range(len(shown)), [f"{_short(run.policy, 60)} ({run.protocol})" for run, _ in shown])
        axis.invert_yaxis()
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.set_xlabel("score minus dense with the question in the same place, points")
        axis.grid(axis="x", color="#e6e6e6", linewidth=0.7)
        axis.set_axisbelow(True)
        _legend(figure, [axis])
        return svg(figure)


def _looks(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each method, the same in every figure; the oracle's ring shows what lies under it."""
    ring = {"color": "#666666", "marker": "o", "markersize": 12, "markerfacecolor": "none", "zorder": 5}
    looks: dict[str, dict[str, Any]] = {"dense": {"color": "#111111", "marker": "*", "markersize": 9}, "topk": ring}
    others = [method for method in dict.fromkeys(run.method for run in runs) if method not in looks]
    for at, method in enumerate(others):
        turn = at // len(COLOURS)  # each time round, colours meet other markers
        colour, marker = COLOURS[at % len(COLOURS)], _MARKERS[(at + turn) % len(_MARKERS)]
        looks[method] = {"color": colour, "marker": marker, "markersize": 7}
    return looks


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}
    columns = min(4, len(entries)) or 1
    lines = -(-len(entries) // columns)
    figure.tight_layout(rect=(0, (0.12 + 0.2 * lines) / figure.get_figheight(), 1, 1))
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="lower center",
        ncol=columns,
        frameon=False,
        fontsize=8.5,
        handlelength=2.4,
    )


def _short(policy: str, most: int) -> str:
    return policy if len(policy) <= most else policy[: most - 1] + "…"


def in_k(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def svg(figure: Any) -> str:
    """The figure as an ``<svg>`` element without prologue, the same text for the same figure."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return re.sub(r"\s+$", "", text[text.index("<svg") :])
