"""What the options of methods may be: checks for ``__post_init__``, and budgets of keys."""

from __future__ import annotations

import math
from typing import Any

from saccade.errors import PolicyError, finite_number, shown, whole_number

LARGEST = 2**31 - 1  # positions are int32


def require(ok: bool, name: str, value: Any, allowed: str) -> None:
    """Raise PolicyError naming the option, its value and the allowed range unless ``ok``."""
    if not ok:
        raise PolicyError(f"{name}={value if isinstance(value, str) else shown(value)} is out of range: {allowed}")


def require_whole(name: str, value: Any, least: int, most: int = LARGEST) -> None:
    """Raise PolicyError unless ``value`` is an integer from ``least`` to ``most``."""
    small = not isinstance(value, int) or isinstance(value, bool) or value < least
    allowed = f"an integer >= {least}" if small else f"an integer from {least} to {most}"
    require(whole_number(value, least, most), name, value, allowed)


def require_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise PolicyError unless ``value`` is one of ``allowed``, in type too (64.0 is no block size, 1 is not true)."""
    require(
        any(type(value) is type(one) and value == one for one in allowed),
        name,
        value,
        "one of " + ", ".join(map(str, allowed)),
    )


def require_budget(name: str, value: Any) -> None:
    """Raise PolicyError unless ``value`` is a number of keys, or a fraction of the visible ones."""
    whole = whole_number(value, 1, LARGEST)
    fraction = isinstance(value, float) and 0 < value < 1
    allowed = f"an integer from 1 to {LARGEST} (keys), or a fraction between 0 and 1 of the visible keys"
    require(whole or fraction, name, value, allowed)


def budget_keys(budget: float, visible: int) -> int:
    """How many of ``visible`` keys a checked budget allows; fractions are rounded up."""
    return min(visible, int(budget) if budget >= 1 else max(1, math.ceil(round(budget * visible, 9))))


def require_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise PolicyError unless ``low <= value <= high`` and value is a number."""
    require(finite_number(value) and low <= value <= high, name, value, f"a number from {low} to {high}")
