"""Fewer rows than a cross product, without losing a pair of settings that could meet in the code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

Axes = Mapping[str | tuple[str, ...], Iterable[Any]]


def covering(axes: Iterable[Iterable[Any]], strength: int = 2) -> list[tuple[Any, ...]]:
    """Rows with a value of each axis, so that any values of any ``strength`` axes stand in some row together. Greedy,
    and the same rows every time."""
    axes = [list(axis) for axis in axes]
    every = list(product(*(range(len(axis)) for axis in axes)))
    groups = list(combinations(range(len(axes)), min(strength, len(axes))))
    parts = [{tuple((at, row[at]) for at in group) for group in groups} for row in every]
    left = set().union(*parts)
    rows: list[tuple[Any, ...]] = []
    while left:
        best = max(range(len(every)), key=lambda number: len(parts[number] & left))
        left -= parts[best]
        rows.append(tuple(axis[at] for axis, at in zip(axes, every[best])))
    return rows


def covered(axes: Axes, strength: int = 2) -> pytest.MarkDecorator:
    """``parametrize`` over :func:`covering` rows. An axis is a name, or some names whose values come as tuples."""
    names: list[str] = []
    for name in axes:
        names += [name] if isinstance(name, str) else name
    rows = []
    for row in covering(list(axes.values()), strength):
        values: list[Any] = []
        for name, value in zip(axes, row):
            values += [value] if isinstance(name, str) else value
        rows.append(tuple(values))
    return pytest.mark.parametrize(names, rows)


def quick(cases: Iterable[Any], rule: Callable[..., bool]) -> list[Any]:
    """``cases``, of which those that are not ``quick`` by ``rule`` wait for ``make test-all``."""
    cases = [one if isinstance(one, tuple) else (one,) for one in cases]
    return [pytest.param(*one, marks=[] if rule(*one) else pytest.mark.thorough) for one in cases]


def thorough(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """``cases`` that wait for ``make test-all``."""
    return quick(cases, lambda *one: False)


def spread(cases: Iterable[Any], settings: Iterable[Any]) -> list[Any]:
    """(case, setting) of all; each case has one of the settings in turn, and the others in ``make test-all``."""
    settings = list(settings)
    return [
        pytest.param(case, setting, marks=[] if place == number % len(settings) else pytest.mark.thorough)
        for number, case in enumerate(cases)
        for place, setting in enumerate(settings)
    ]
