"""How much a value from JSON holds."""

from __future__ import annotations

from typing import Any

_EACH = 64  # letters that a value besides its text counts as: what an object takes, and what walking over it costs


def weight(value: Any, most: int | None = None) -> int:
    """Letters of all texts and names within ``value``, and 64 for each value. Counting ends beyond ``most``."""
    total, left = 0, [value]
    while left and (most is None or total <= most):
        one = left.pop()
        total += _EACH
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, dict):
            total += sum(map(len, one))
            left.extend(one.values())
        elif isinstance(one, (list, tuple)):
            left.extend(one)
    return total
