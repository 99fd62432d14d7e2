"""Training rows of the reference model: conversations of exact length over the suite's worlds, many questions each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.eval.suite import compose, sections, worlds
from saccade.eval.suite.compose import GIVEN, TAUGHT, Message
from saccade.eval.suite.filler import NEWLINE, Prose, prose
from saccade.eval.suite.rng import Rng
from saccade.eval.suite.worlds import Item, Plan, Question, World
from saccade.models.reference import vocabulary as v

# What an answer token counts against a token of background. Keys and values in a context are noise and count nothing.
WEIGHTS = np.array([0.05, 0.0, 1.0], dtype=np.float32)
# About what one question with its answer takes.
_QUESTION_COST = {"span_copy": 95, "table_copy": 38, "multivalue": 32, "multiquery": 45, "three_turn": 36, "topic": 24}
MIX = {
    "single": 8, "multikey": 8, "multikey_all": 10, "multivalue": 6, "multiquery": 7, "vt": 12, "words": 5,
    "common": 6, "legend": 7, "span_copy": 7, "table_copy": 7, "topic": 8, "update": 5, "three_turn": 5,
}  # fmt: skip
_ALONE = ("words", "common", "update", "three_turn")  # worlds that do not share a context with another


@dataclass
class Row:
    """ids, kinds: uint16 and uint8 [length]."""

    task: str
    ids: np.ndarray
    kinds: np.ndarray


def make_row(rng: Rng, task: str, length: int, source: Prose) -> Row:
    """One conversation of exactly ``length`` tokens. Raises ValueError where the task does not fit into it."""
    for _ in range(1000):
        world, depths, most = _world(rng, task, length, source)
        contexts = 1 if length < 400 or rng.random() < 0.6 else rng.between(2, 3)
        if task in ("update", "three_turn"):
            contexts = {"update": 2, "three_turn": 3}[task]
        while True:
            stretches = compose.plan_turns(
                rng, world, depths, compose.borders(contexts), most, ("begin", "middle", "end")
            )
            if not stretches:
                break
            # The last stretch always holds the rest of the context; what no question reaches is left out.
            spare = length - compose.cost(world, stretches)
            if spare >= 0:
                conversation = compose.messages(rng, world, depths, stretches, spare, source)
                ids, kinds = transcript(conversation)
                return Row(task, np.array(ids, dtype=np.uint16), np.array(kinds, dtype=np.uint8))
            if most == 1:
                break
            most = max(1, most * 3 // 4)
    raise ValueError(f"task {task!r} does not fit into rows of {length} tokens")


def _world(rng: Rng, task: str, length: int, source: Prose) -> tuple[World, list[float], int]:
    share = 0.3 + 0.6 * rng.random()
    most = max(1, min(48, int(length * (1 - share) / _QUESTION_COST.get(task, 16))))
    wanted = max(1, int(most * (0.3 + 0.7 * rng.random())))
    budget = int(length * share * (0.95 if rng.random() < 0.5 else 0.2 + 0.7 * rng.random()))
    world = _maker(task)(Plan(rng, budget, wanted, source, held_out=False))
    if task not in _ALONE and rng.random() < 0.3 and length >= 512:
        other = rng.choice([name for name in MIX if name not in _ALONE and name != "multikey_all"])
        world = _merged(world, _maker(other)(Plan(rng, budget // 4, max(1, wanted // 2), source, held_out=False)))
        rng.shuffle(world.questions)
    depth = compose.place(rng, world)
    return world, depth, most


def _maker(name: str) -> Callable[[Plan], World]:
    return getattr(sections if hasattr(sections, name) else worlds, name)


def _merged(first: World, second: World) -> World:
    shift = len(first.items)
    items: list[Item] = [*first.items, *second.items]
    questions = list(first.questions)
    for q in second.questions:
        questions.append(Question(q.ids, q.answers, q.metric, [i + shift for i in q.needs]))
    groups = [*first.groups, *([i + shift for i in group] for group in second.groups)]
    return World(items, questions, groups, None, first.repeat)


def make_batch(key: tuple[object, ...], length: int, tasks: Sequence[str], span: int = 0) -> dict[str, Any]:
    """One row of ``length`` tokens for each of ``tasks``: ids uint16, kinds uint8, positions int32, all [rows, length].

    With ``span`` > length the positions skip at line breaks, so that they reach up to ``span``."""
    rng = Rng(*key)
    source = prose(f"train{rng.below(64)}")
    rows = [make_row(rng, task, length, source) for task in tasks]
    ids = np.stack([row.ids for row in rows])
    return {
        "ids": ids,
        "kinds": np.stack([row.kinds for row in rows]),
        "positions": np.stack([_positions(rng, row.ids, span) for row in rows]),
        "tasks": list(tasks),
    }


def _positions(rng: Rng, ids: np.ndarray, span: int) -> np.ndarray:
    length = len(ids)
    positions = np.arange(length, dtype=np.int32)
    if span <= length or rng.random() < 0.25:
        return positions
    lines = np.flatnonzero(ids == NEWLINE)
    lines = lines[lines > 0]
    if not len(lines):
        return positions
    cuts = [int(lines[rng.below(len(lines))]) for _ in range(rng.between(1, 7))]
    total = int((span - length) * rng.random())
    shares = rng.randoms(len(cuts))
    for cut, gap in zip(cuts, (shares / shares.sum() * total).astype(np.int32)):
        positions[cut:] += gap
    return positions


def transcript(conversation: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Ids and kinds of the whole conversation, replies included, as the chat template writes it."""
    ids, kinds = [v.BOS], [GIVEN]
    for message in conversation:
        ids.append(v.USER)
        kinds.append(GIVEN)
        for part, marks in message.parts():
            ids += part
            kinds += marks
        reply = message.question.reply()
        ids += [v.END, v.ASSISTANT, *reply, v.END]
        kinds += [GIVEN, GIVEN, *[TAUGHT] * (len(reply) + 1)]
    return ids, kinds
