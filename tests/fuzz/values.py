"""Values that somebody could give by mistake, and mistakes in texts and files that were right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

NASTY = "\n\r\t\x00\u2028\u0085\ud800é漢😀=,()[]{}:+'\"\\%/~*-.0123456789eEjnaNif "
NAMES = ("", "a", "two\nlines", "x" * 5000, "\ud800", "auto", "none", "all", "é漢😀", "\x00", "-1", "1e999", "../..")
NUMBERS = (0, 1, -1, 2, 3, 7, 32, 33, 64, 10**6, 2**31, 2**63 - 1, 2**63, 10**30, 10**400, -(10**400), 10**5000)
FLOATS = (0.0, -0.0, 0.5, 0.999, 1.0, 1.5, -0.5, 1e-320, 1e-39, 1e30, 1e308, float("inf"), -float("inf"), float("nan"))
OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: False,
    lambda: [],
    lambda: {},
    lambda: (),
    lambda: {1, 2},
    lambda: b"bytes",
    lambda: 1j,
    lambda: object(),
    lambda: type,
    lambda: len,
    lambda: np.array([1, 2]),
    lambda: np.float32(0.5),
    lambda: np.int64(3),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.tensor(3),
    lambda: torch.float32,
    lambda: nested(300),
    lambda: iter([1, 2]),
)


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def value(rng: random.Random, depth: int = 2) -> Any:
    """Anything."""
    way = rng.random()
    if way < 0.25:
        return rng.choice(NUMBERS)
    if way < 0.45:
        return rng.choice(FLOATS)
    if way < 0.6:
        return rng.choice(NAMES)
    if way < 0.85 or depth == 0:
        return rng.choice(OTHERS)()
    made = [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.5:
        return made
    return {rng.choice((*NAMES, 1, None, -3)): one for one in made}


def plain(rng: random.Random, depth: int = 2) -> Any:
    """Anything that JSON can hold."""
    made = value(rng, depth)
    try:
        json.dumps(made)
    except (TypeError, ValueError, RecursionError):
        return rng.choice((*NUMBERS[:-1], *FLOATS, *NAMES, None, True, [1, None], {"a": []}))
    return made


def spoilt(rng: random.Random, text: str, most: int = 4) -> str:
    """``text`` with some letters gone, doubled, swapped or put in."""
    letters = list(text)
    for _ in range(rng.randint(1, most)):
        at = rng.randint(0, len(letters))
        way = rng.random()
        if way < 0.3:
            del letters[at : at + rng.randint(1, 4)]
        elif way < 0.7:
            letters[at:at] = rng.choice(NASTY) * rng.choice((1, 1, 1, 2, 40))
        elif way < 0.85:
            letters[at:at] = letters[at : at + rng.randint(1, 20)]
        else:
            letters[at : at + 1] = str(
                rng.choice((*NUMBERS[:-1], *FLOATS)) if rng.random() < 0.5 else rng.choice(NAMES)
            )[:400]
    return "".join(letters)


def spoilt_bytes(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """``data`` with some bytes changed, gone or put in, or cut off."""
    letters = bytearray(data)
    if rng.random() < 0.2:
        return bytes(letters[: rng.randint(0, len(letters))])
    for _ in range(rng.randint(1, most)):
        at = rng.randint(0, max(0, min(len(letters), rng.choice((12, 200, len(letters)))) - 1))
        way = rng.random()
        if way < 0.5:
            letters[at : at + 1] = bytes([rng.randint(0, 255)])
        elif way < 0.75:
            del letters[at : at + rng.randint(1, 8)]
        else:
            letters[at:at] = bytes(rng.randint(0, 255) for _ in range(rng.randint(1, 8)))
    return bytes(letters)


def spoilt_tree(rng: random.Random, tree: Any) -> Any:
    """A JSON tree, some place of which is gone, renamed or something else. Changes it in place where it can."""
    places = list(_places(tree))
    for owner, key in rng.sample(places, min(len(places), rng.randint(1, 3))):
        try:
            if rng.random() < 0.3:
                del owner[key]
            else:
                owner[key] = plain(rng)
        except (KeyError, IndexError):  # gone with what was changed before
            pass
    return tree if places and rng.random() > 0.02 else plain(rng)


def _places(tree: Any, depth: int = 6) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:50]) if isinstance(tree, list) else ()
    for key, child in items:
        yield tree, key
        if depth:
            yield from _places(child, depth - 1)
