"""The options of every method: ``python tools/method_options.py`` writes docs/results/method-options.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saccade.cli.methods import describe
from saccade.methods.outside import load_outside
from saccade.methods.registry import KNOWN

PAGE = Path(__file__).parent.parent / "docs" / "results" / "method-options.md"
HEAD = """# Every method's options

What a [policy](../methods.md) can be made of, with all options and their defaults; `saccade methods NAME` says what a
method's options mean. `python tools/method_options.py` writes this page from the code.

| method | phases | options (defaults) | source |
|---|---|---|---|
"""


def shown(value: Any) -> str:
    """A default as a policy writes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def page() -> str:
    """Of Saccade's own packages: what others register is theirs to document."""
    load_outside()
    rows = []
    for name, part in sorted(KNOWN.items()):
        if part.__module__.partition(".")[0] not in ("saccade", "saccade_contrib"):
            continue
        said = describe(part)
        options = ", ".join(f"{option}={shown(value)}" for option, value in said["options"].items())
        cells = (f"`{name}`", ", ".join(said["phases"]), f"`{options}`" if options else "", said["paper"])
        rows.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
