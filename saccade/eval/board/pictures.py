"""The board's pictures: what is lost against keys, bytes and recall, a panel each, and a marker for every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log10
from typing import Any

from saccade.eval.board.entries import ENTRIES
from saccade.eval.board.rows import Part, Row
from saccade.eval.figures import new_figure, styled
from saccade.eval.plots import COLOURS, STYLE, TICKS, in_k, svg

_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "d", "h", "8", "H")
_STROKES = ("x", "+", "1", "2", "3", "4", "|", "_", "$A$", "$B$", "$C$", "$E$", "$F$", "$G$", "$K$", "$R$", "$S$")
# Filled, hollow, lines and letters: no two rows share one, whatever their colours.
MARKERS = [*((one, True) for one in _SHAPES), *((one, False) for one in _SHAPES), *((one, True) for one in _STROKES)]
_LOOKS = {
    entry.name: {
        "marker": shape,
        "color": COLOURS[at % len(COLOURS)],
        "markerfacecolor": COLOURS[at % len(COLOURS)] if filled else "none",
    }
    for at, (entry, (shape, filled)) in enumerate(zip(ENTRIES, MARKERS))
}
_OUTSIDE = {"marker": "$?$", "color": COLOURS[0], "markerfacecolor": COLOURS[0]}  # of methods from outside
_AXES: dict[str, tuple[str, Callable[[Part], float | None]]] = {
    "keys": ("keys read, of those dense reads (log scale)", lambda part: part.keys),
    "bytes": ("bytes read, of those dense reads (log scale)", lambda part: part.read),
    "recall": ("recall: attention mass kept", lambda part: part.recall),
}


def look(name: str) -> dict[str, Any]:
    """How a row is drawn, the same everywhere."""
    return _LOOKS.get(name, _OUTSIDE)


def marker(name: str) -> str:
    """A row's marker alone, as SVG."""
    with styled(STYLE):
        figure = new_figure(figsize=(0.22, 0.22))
        axis = figure.add_axes((0, 0, 1, 1))
        axis.plot([0], [0], markersize=8, markeredgewidth=1.4, linestyle="none", **look(name))
        axis.axis("off")
        figure.patch.set_alpha(0)
        return svg(figure)


def panels(rows: Sequence[Row], protocol: str, phase: str) -> list[tuple[str, str]]:
    """(title, SVG) of every length and axis that has points: points lost against what was read or kept."""
    shown = [row for row in rows if (row.protocol, row.entry.phase) == (protocol, phase) and row.parts]
    drawn = []
    for length in sorted({length for row in shown for length in row.parts}):
        for axis in _AXES if phase == "decode" else ("keys", "recall"):
            picture = _panel(shown, length, axis)
            if picture:
                drawn.append((f"{in_k(length)} tokens, {phase}: {axis}", picture))
    return drawn


def drift_panel(rows: Sequence[Row], length: int) -> list[tuple[str, str]]:
    """(title, SVG) of what decode methods drift by against the keys that they read; nothing where none was measured."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        drift = row.drifts.get(length)
        keys = None if drift is None or row.entry.phase != "decode" else drift.keys("decode")
        if drift is not None and keys and drift.mean > 0:
            curves.setdefault(row.entry.name, []).append((keys, drift.mean))
    if not curves:
        return []
    with styled({**STYLE, "font.size": 10.5}):
        figure = new_figure(figsize=(5.4, 4.0))
        axis = figure.subplots()
        for name, points in curves.items():
            xs, ys = zip(*sorted(points))
            axis.plot(xs, ys, linewidth=0.9, alpha=0.9, markersize=7, markeredgewidth=1.3, **look(name))
        axis.set_xscale("log")
        axis.set_yscale("log")
        places = [x for points in curves.values() for x, _ in points]
        ticks = sorted(tick for tick in (*TICKS, 0.03, 0.07, 0.15, 0.3, 0.7) if min(places) <= tick <= max(places))
        axis.set_xticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set_xlabel(_AXES["keys"][0])
        axis.set_ylabel("KL to dense, nats (log scale)")
        axis.grid(color="#e6e6e6", linewidth=0.7)
        axis.set_axisbelow(True)
        figure.tight_layout()
        return [(f"{in_k(length)} tokens, decode: drift", svg(figure))]


def _panel(rows: Sequence[Row], length: int, what: str) -> str | None:
    title, value = _AXES[what]
    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        part = row.parts.get(length)
        x = value(part) if part is not None else None
        if part is not None and x and part.cell.difference is not None:
            lost = part.cell.difference
            point = (x, 100 * lost.mean, 100 * (lost.mean - lost.low), 100 * (lost.high - lost.mean))
            curves.setdefault(row.entry.name, []).append(point)
    if not curves:
        return None
    with styled({**STYLE, "font.size": 10.5}):
        figure = new_figure(figsize=(5.4, 4.0))
        axis = figure.subplots()
        axis.axhline(0, color="#111111", linewidth=1, linestyle="--")
        for name, points in curves.items():
            xs, ys, below, above = zip(*sorted(points))
            bars = {"elinewidth": 0.6, "capsize": 0, "markersize": 7, "markeredgewidth": 1.3}
            axis.errorbar(xs, ys, yerr=[below, above], linewidth=0.9, alpha=0.9, **bars, **look(name))
        places = [x for points in curves.values() for x, *_ in points]
        lowest = min(y for points in curves.values() for _, y, *_ in points)
        highest = max(y for points in curves.values() for _, y, *_ in points)
        room = max(1.0, 0.06 * (highest - lowest))
        axis.set_ylim(lowest - room, max(highest, 0.0) + room)
        if what == "recall":
            side = max(0.005, 0.05 * (max(places) - min(places)))
            axis.set_xlim(min(places) - side, min(1.0, max(places)) + side)
        else:
            axis.set_xscale("log")
            side = 10 ** max(0.02, 0.05 * log10(max(places) / min(places)))
            low, high = min(places) / side, max(places) * side
            ticks = [tick for tick in (*TICKS, 0.03, 0.07, 0.15, 0.3, 0.7, 1.5) if low <= tick <= high]
            axis.set_xticks(sorted(ticks), [f"{100 * tick:g} %" for tick in sorted(ticks)])
            axis.set_xticks([], minor=True)
            axis.set_xlim(low, high)
        axis.set_xlabel(title)
        axis.set_ylabel("score minus dense, points")
        axis.grid(color="#e6e6e6", linewidth=0.7)
        axis.set_axisbelow(True)
        figure.tight_layout()
        return svg(figure)
