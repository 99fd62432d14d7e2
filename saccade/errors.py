"""Errors a user can cause. Each message names the value, the allowed range and the way out."""

from __future__ import annotations

import math

LONGEST = 2000  # letters of an error's message


class SaccadeError(ValueError):
    """Base of every error that bad input can cause; the command line prints it and exits with code 2. Its message is
    one line that can be printed, whatever it quotes; the middle of a very long one is left out."""

    def __init__(self, message: object = "") -> None:
        text = one_line(message)
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}")


class ModelError(SaccadeError):
    """A checkpoint that is missing, broken, or of a family this engine cannot run correctly."""


class PolicyError(SaccadeError):
    """A policy text, method name or method option that is unknown or out of range."""


class RequestError(SaccadeError):
    """A request that cannot be served: empty or over-long prompt, bad sampling parameter, unreadable prompt file."""


class CapacityError(SaccadeError):
    """A request that can never fit the KV pool."""


class EngineLost(SaccadeError):
    """An engine that ended by itself, with all that it was asked for."""


def one_line(text: object) -> str:
    """A text without line breaks; what else a terminal has no letter for is spelt out."""
    line = " ".join(part.strip() for part in str(text).splitlines() if part.strip())
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def shown(value: object, most: int = 200) -> str:
    """A bad value as an error may quote it: one line of at most ``most`` characters, whatever it is."""
    try:
        text = one_line(repr(value))
    except Exception:  # a number of too many digits, an object that fails to show itself
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def half_pair(text: str) -> str | None:
    """Where the half of a surrogate pair stands that no UTF-8 can hold, and the way out; None where there is none."""
    if text.isascii():
        return None
    place = next((place for place, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
    if place is None:
        return None
    return f"U+{ord(text[place]):04X} at character {place} is half of a surrogate pair; remove it, or give both halves"


def check_share(name: str, value: object, error: type[SaccadeError] = SaccadeError) -> None:
    """Raise ``error`` unless ``value`` is a number from 0 to 1."""
    if not finite_number(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise error(f"{name}={shown(value)} must be a number from 0 to 1")


def whole_number(value: object, least: int, most: int = 2**63 - 1) -> bool:
    """Whether ``value`` is an integer, and none of bool's, from ``least`` to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def finite_number(value: object) -> bool:
    """Whether ``value`` is a number that a float holds, and none of bool's."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer
        return False
