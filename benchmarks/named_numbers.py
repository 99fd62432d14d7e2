"""Options of benchmarks that give a number to a name: NAME=NUMBER, once for each name."""

from __future__ import annotations

import math
from collections.abc import Iterable


def named_numbers(
    option: str, texts: Iterable[str], form: str, example: str, most: float = math.inf
) -> dict[str, float]:
    """The number of each name, above 0 and at most ``most``. SystemExit, naming the ``option`` and the text, for one
    that is not of the ``form`` (as "NAME=SHARE" is) or whose number is beyond that range."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise SystemExit(f"{option} {text!r} must be {form}, as in {example}") from None
        if not 0 < found[name] <= most:
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise SystemExit(f"{option} {text!r}: {form.partition('=')[2]} must be above 0{limit}")
    return found
