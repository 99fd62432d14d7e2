"""Worlds of headed sections and of table rows: what has to be copied whole, or found again by one word of it."""

from __future__ import annotations

from saccade.eval.suite.filler import COMMANDS, NEWLINE, RARE
from saccade.eval.suite.rng import Rng
from saccade.eval.suite.world import Item, Plan, Question, World, ask
from saccade.models.reference import vocabulary as v

_OPEN, _CLOSE, _BAR = (v.char(symbol) for symbol in "[]|")


def _content(rng: Rng, count: int) -> list[int]:
    span = v.SIZE - RARE - v.FILLER - COMMANDS
    return [v.FILLER + COMMANDS + int(x * span) for x in rng.randoms(count).tolist()]


def span_copy(plan: Plan) -> World:
    """Sections ``[ adjective noun]`` of 32 to 128 random words; one is to be copied whole."""
    rng = plan.rng
    most = 128 if plan.budget >= 512 else 40
    count = max(1, min(max(2, plan.wanted), plan.budget // (most + 6)))
    world = World([])
    for index, key in enumerate(plan.keys(count)):
        content = _content(rng, rng.between(32, most))
        world.items.append(Item([NEWLINE, _OPEN, *key, _CLOSE, *content, NEWLINE]))
        world.questions.append(Question(ask("copy", key), [content], "token_accuracy", [index]))
    rng.shuffle(world.questions)
    return world


def table_copy(plan: Plan) -> World:
    """A table whose rows begin with a key; one row of 8 to 40 cells is to be copied."""
    rng = plan.rng
    columns = rng.between(8, 40 if plan.budget >= 512 else 14)
    rows = max(2, min(max(12, plan.wanted), int(plan.budget * 0.7) // (columns + 5)))
    line = _content(rng, columns)
    world = World([])
    for index, key in enumerate(plan.keys(rows)):
        keep = rng.randoms(columns).tolist()
        line = [new if u > 0.7 else old for u, old, new in zip(keep, line, _content(rng, columns))]
        world.items.append(Item([NEWLINE, *key, _BAR, *line, NEWLINE]))
        world.questions.append(Question(ask("row", key), [line], "token_accuracy", [index]))
    rng.shuffle(world.questions)
    return world


def topic(plan: Plan) -> World:
    """Sections of topical prose, each with one word near its beginning that stands nowhere else. Asked: the section
    with that word, by its heading (and, unscored, its first eight words)."""
    rng = plan.rng
    most = 120 if plan.budget >= 1024 else 48
    count = max(2, min(RARE, max(4, plan.wanted), plan.budget // (most + 6)))
    rare = rng.distinct(RARE, count)
    world = World([])
    for index, key in enumerate(plan.keys(count)):
        text = plan.prose.cut(rng, rng.between(24, most))
        mark = v.SIZE - RARE + rare[index]
        text.insert(rng.between(2, 8), mark)
        world.items.append(Item([NEWLINE, _OPEN, *key, _CLOSE, *text, NEWLINE]))
        world.questions.append(Question(ask("topic", [mark]), [[*key, *text[:8]]], "prefix", [index], scored=2))
    rng.shuffle(world.questions)
    return world
