"""Errors a user can cause. Each message names the value, the allowed range and the way out."""

from __future__ import annotations

import math

LONGEST = 2000  # letters of an error's message


class SaccadeError(ValueError):
    """Base of every error that bad input can cause; the command line prints it and exits with code 2. Its message is
    one line that can be printed, whatever it quotes; the middle of a very long one is left out."""

    def __init__(self, message: object = "") -> None:
        super().__init__(brief(message))


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


class EngineStuck(EngineLost):
    """An engine that does not get on. It may do so again; what it was asked is lost."""


def brief(message: object) -> str:
    """An error's message as one line, the middle of a very long one left out, at no more cost than of a short one."""
    text = str(message)
    for _ in range(2):  # what is spelt out becomes longer
        if len(text) > LONGEST:
            text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
        text = one_line(text)
    return text


def shown(value: object, most: int = 200) -> str:
    """A bad value as an error may quote it: one line of at most ``most`` characters, whatever it is, at no more cost
    than of a value that fits."""
    try:
        text = one_line(repr(_cut(value, [most + 1])))
    except Exception:  # a number of too many digits, an object that fails to show itself
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _cut(value: object, left: list[int]) -> object:
    """``value`` without what lies behind its first ``left[0]`` letters and elements. Each is at least one letter of its
    representation, which is as long as it may get then."""
    left[0] -= 1
    if isinstance(value, (str, bytes)):
        part = value[: max(0, left[0]) + 1]
        left[0] -= len(part)
        return part
    if type(value) in (list, tuple):
        elements = []
        for one in value:  # type: ignore[attr-defined]
            if left[0] <= 0:
                break
            elements.append(_cut(one, left))
        return type(value)(elements)  # type: ignore[call-arg]
    if type(value) is dict:
        pairs = {}
        for name, one in value.items():
            if left[0] <= 0:
                break
            pairs[_cut(name, left)] = _cut(one, left)
        return pairs
    return value


def half_pair(text: str) -> str | None:
    """Where the half of a surrogate pair stands that no UTF-8 can hold, and the way out; None where there is none."""
    if text.isascii():
        return None
    place = next((place for place, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
    if place is None:
        return None
    return f"U+{ord(text[place]):04X} at character {place} is half of a surrogate pair; remove it, or give both halves"


def class_name(error: BaseException) -> str | None:
    """The class of this module that ``error`` is of, or one derived from it: what passes between processes, to which
    others need not be known. None where it is of none."""
    return next((one.__name__ for one in type(error).__mro__ if one.__module__ == __name__), None)


def is_of(name: str | None, kind: type[SaccadeError]) -> bool:
    """Whether the class that ``class_name`` gave as ``name`` is ``kind``, or derived from it."""
    own = globals().get(name or "")
    return isinstance(own, type) and issubclass(own, kind)


def failure(error: BaseException, where: str = "") -> tuple[str, str | None]:
    """What a request that ``error`` ended ``where`` it says is told, and the error's ``class_name``."""
    return f"{where and f'{where}: '}{type(error).__name__}: {error}", class_name(error)


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
