"""Tables of all parts as ``OUT/report.md``, printed as well."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
PARTS = ("limits", "prefill", "decode", "endtoend", "reference")


def cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def tables(part: str) -> list[str]:
    try:
        found = json.loads((OUT / f"{part}.json").read_text())
    except (OSError, ValueError) as error:
        return [f"## {part}", "", f"nothing was written: {error}", ""]
    lines = [f"## {part}", "", *(f"- {key}: {value}" for key, value in found["facts"].items()), ""]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault(tuple(row), []).append(row)
    for columns, rows in groups.items():
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|" + " --- |" * len(columns))
        lines += ["| " + " | ".join(cell(row[column]) for column in columns) + " |" for row in rows]
        lines.append("")
    return lines


text = "\n".join(["# GPU measurements", "", *(line for part in PARTS for line in tables(part))])
(OUT / "report.md").write_text(text, encoding="utf-8")
print(text[-9000:], flush=True)
