"""The pictures of the documentation, as SVG: ``python tools/pictures.py`` writes docs/images/*.svg.

The frontier is drawn from docs/results/board-4k.json; the others show what docs/architecture.md and docs/tiers.md say.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BOARD = ROOT / "docs" / "results" / "board-4k.json"
INK, SOFT, BLUE, RED, GREEN = "#1f2933", "#9aa5b1", "#2166ac", "#b2182b", "#1b7837"


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """A drawing on white, so that it reads in the dark theme too."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="13"'
            ' font-family="system-ui, sans-serif">',
            f"<title>{escape(title)}</title>",
            f'<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, anchor: str = "start", color: str = INK, weight: str = "400") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, lines: list[str], color: str = INK) -> str:
    """A box whose first line is its name."""
    first = y + height / 2 - 8 * (len(lines) - 1) + 4
    words = [
        text(x + width / 2, first + 16 * at, line, "middle", INK if at else color, "400" if at else "600")
        for at, line in enumerate(lines)
    ]
    frame = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="none" stroke="{color}"/>'
    return "".join([frame, *words])


def arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{INK}" marker-end="url(#a)"/>'


def spread(wanted: list[float], least: float) -> list[float]:
    """Rising places at least ``least`` apart, each as near to the one wanted as a pass down and one up make it."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + least) if places else place)
    if places:
        over = max(0.0, places[-1] - wanted[-1])
        places = [place - over / 2 for place in places]
    return places


def lines(board: dict[str, Any]) -> Iterator[tuple[str, str, list[tuple[float, float]]]]:
    """(method, kind, (share of the keys read, points lost) at each budget) under B, where it keeps to budgets."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in board["rows"]:
        if row["protocol"] == "B" and row["matched"] and row["kind"] in ("method", "oracle", "baseline"):
            place = (row["keys"], -100 * row["difference"])
            found.setdefault((row["method"], row["kind"]), []).append(place)
    for (method, kind), places in found.items():
        if len(places) > 1:
            yield method, kind, sorted(places)


def frontier(board: dict[str, Any]) -> str:
    """Points lost against keys read, a line a method, labels at the right."""
    left, right, top, bottom = 70, 560, 40, 470
    colors = {"method": BLUE, "oracle": GREEN, "baseline": SOFT}

    def at(keys: float, lost: float) -> tuple[float, float]:
        x = left + (right - left) * math.log(keys / 0.04) / math.log(0.3 / 0.04)
        return round(x, 1), round(top + (bottom - top) * math.sqrt(min(max(lost, 0.0), 100.0) / 100.0), 1)

    parts = [
        text(
            left,
            22,
            "Points lost against dense, by keys read: 4K tokens, question in sparse decode steps (B)",
            weight="600",
        )
    ]
    for lost in (0, 1, 5, 10, 25, 50, 100):
        y = at(0.04, lost)[1]
        parts.append(f'<path d="M{left} {y:g}H{right}" stroke="#e4e7eb"/>')
        parts.append(text(left - 8, y + 4, str(lost), "end", SOFT))
    for keys in (0.05, 0.1, 0.25):
        x = at(keys, 0)[0]
        parts.append(f'<path d="M{x:g} {top}V{bottom}" stroke="#e4e7eb"/>')
        parts.append(text(x, bottom + 18, f"{100 * keys:g} %", "middle", SOFT))
    parts.append(text((left + right) / 2, bottom + 36, "keys read, of dense", "middle", SOFT))
    drawn = sorted(lines(board), key=lambda line: (at(*line[2][-1])[1], line[0]))
    labels = spread([at(*places[-1])[1] for *_, places in drawn], 16)
    for (method, kind, places), y in zip(drawn, labels, strict=True):
        points = [at(*place) for place in places]
        path = " ".join(f"{x:g},{height:g}" for x, height in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[kind]}" stroke-width="1.6"/>')
        parts += [f'<circle cx="{x:g}" cy="{height:g}" r="3" fill="{colors[kind]}"/>' for x, height in points]
        parts.append(
            f'<path d="M{points[-1][0]:g} {points[-1][1]:g}L{right + 14} {y:g}" stroke="{colors[kind]}"'
            ' stroke-width=".5"/>'
        )
        name = method if kind == "method" else f"{method} ({kind})"
        parts.append(text(right + 18, round(y + 4, 1), name, color=colors[kind] if kind != "baseline" else "#616e7c"))
    return svg(760, 520, "Points lost against keys read, a line a method", parts)


def request() -> str:
    """The life of a request, as docs/architecture.md tells it."""
    parts = [
        text(95, 24, "any thread, any task", "middle", SOFT),
        text(370, 24, "the engine's thread", "middle", SOFT),
        text(660, 24, "below the scheduler", "middle", SOFT),
        box(10, 40, 170, 56, ["LLM.generate", "stream, HTTP, session"]),
        box(265, 40, 210, 56, ["inbox", "plain data"]),
        box(265, 126, 210, 56, ["schedule", "who runs, which rows, blocks"]),
        box(265, 298, 210, 56, ["settle", "token, report, end"]),
        box(560, 126, 200, 56, ["worker", "one step of many requests"], BLUE),
        box(560, 212, 95, 56, ["device", "recorded"], BLUE),
        box(665, 212, 95, 56, ["host", "per layer"], BLUE),
        box(560, 298, 200, 56, ["select, read, learn", "counts of work done"], BLUE),
        box(10, 298, 170, 56, ["outputs", "text, report"]),
        arrow((180, 68), (265, 68)),
        arrow((370, 96), (370, 126)),
        arrow((475, 154), (560, 154)),
        text(515, 146, "StepInput", "middle", SOFT),
        arrow((607, 182), (607, 212)),
        arrow((712, 182), (712, 212)),
        arrow((607, 268), (607, 298)),
        arrow((712, 268), (712, 298)),
        arrow((560, 326), (475, 326)),
        text(515, 318, "StepResult", "middle", SOFT),
        arrow((320, 298), (320, 182)),
        text(314, 244, "next step", "end", SOFT),
        arrow((265, 326), (180, 326)),
    ]
    return svg(780, 375, "The life of a request", parts)


def tiers() -> str:
    """Where parts of blocks lie, as docs/tiers.md tells it."""
    parts = [
        box(30, 30, 220, 70, ["slots: kv_memory", "what attention reads"], BLUE),
        box(30, 160, 220, 70, ["host memory: kv_host", "pinned, beside a GPU"], GREEN),
        box(30, 290, 220, 70, ["disk: kv_disk", "a file without a name"], RED),
        arrow((90, 100), (90, 160)),
        arrow((190, 160), (190, 100)),
        arrow((90, 230), (90, 290)),
        arrow((190, 290), (190, 230)),
        text(275, 60, "Sparse decode chooses by summaries that stay in memory;"),
        text(275, 78, "then only the blocks that were chosen come."),
        text(275, 125, "Down: the least wanted leave; a full block is written once."),
        text(275, 143, "Up: a kernel copies scattered blocks within a recorded step."),
        text(275, 190, "A CPU may attend keys where they lie (kv_compute)."),
        text(275, 255, "Down: what was not used for longest, in records."),
        text(275, 273, "Up: threads read neighbours; checksums are compared."),
        text(275, 320, "What is lost is computed again."),
        text(275, 338, "A CPU has this tier right below its memory."),
    ]
    return svg(700, 385, "Keys and values beyond memory", parts)


def pictures() -> dict[str, str]:
    """Name of each file in docs/images, and what is in it."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    return {"frontier.svg": frontier(board), "request.svg": request(), "tiers.svg": tiers()}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    for name, drawn in pictures().items():
        (folder / name).write_text(drawn, encoding="utf-8")
