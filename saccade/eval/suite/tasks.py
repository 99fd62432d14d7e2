"""The suite's tasks: evaluation samples as text, each a function of version, task, length, seed and index alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from saccade.errors import RequestError
from saccade.eval.samples import POSITIONS, Sample, Turn
from saccade.eval.suite import compose, sections, worlds
from saccade.eval.suite.filler import prose
from saccade.eval.suite.rng import Rng
from saccade.eval.suite.worlds import Plan, World
from saccade.models.reference import vocabulary as v

VERSION = "1"
SHORTEST = 256
LONGEST = 262_144
DEPTHS = 10  # bins over which the item that is asked for is spread, a third of the context on with each index


@dataclass(frozen=True)
class Task:
    """``wanted``: questions that the world offers; ``asked``: how many of them are asked; ``turns``: stretches of
    context, each with a question; ``share``: of the length, what the world's items may take."""

    world: Callable[[Plan], World]
    summary: str
    wanted: int = 1
    asked: int = 1
    turns: int = 1
    share: float = 0.9
    position: str = "end"
    shared: bool = False


TASKS: dict[str, Task] = {
    "single": Task(worlds.single, "one needle in prose or in one sentence over and over; digits or hexadecimal"),
    "multikey": Task(worlds.multikey, "four needles whose keys share words, one asked", wanted=2),
    "multikey_all": Task(worlds.multikey_all, "nothing but needles, half of the keys share a word, one asked"),
    "multivalue": Task(worlds.multivalue, "one key with four values, all asked", wanted=2),
    "multiquery": Task(worlds.multiquery, "four of eight keys asked at once", wanted=4),
    "vt": Task(worlds.vt, "variable tracking over two to four hops, both ways"),
    "words": Task(worlds.words, "the three most frequent words of a skewed stream"),
    "common": Task(worlds.common, "the five words that stand out among many"),
    "legend": Task(worlds.legend, "rules declared once, applied to a line", wanted=4),
    "span_copy": Task(sections.span_copy, "a section of 32 to 128 random words, copied whole", wanted=6),
    "table_copy": Task(sections.table_copy, "a row of 8 to 40 cells, copied whole"),
    "update": Task(worlds.update, "a key that a later turn sets again, asked in both", wanted=4, asked=2, turns=2),
    **{
        f"three_turn_{position}": Task(
            worlds.three_turn,
            f"three turns with contexts of their own, the question at the {position}",
            wanted=3,
            asked=3,
            turns=3,
            position=position,
        )
        for position in POSITIONS
    },
    "shared": Task(worlds.multikey, "four questions on one context, each on its own", wanted=4, asked=4, shared=True),
}  # fmt: skip
# What the reference model does not do well under dense attention (docs/reference-model.md): it tells nothing.
DROPPED: dict[str, Task] = {"topic": Task(sections.topic, "the section in which a word stands", share=0.8)}


def make(task: str, length: int, index: int, seed: int = 0) -> Sample:
    """Sample ``index`` of a task; the whole conversation, replies included, takes ``length`` tokens of the reference
    model's vocabulary. Raises RequestError for an unknown task or a length outside 256 .. 262,144."""
    known = {**TASKS, **DROPPED}
    if task not in known:
        raise RequestError(f"task {task!r} is unknown; known: {', '.join(known)}")
    return sample(task, known[task], length, index, seed)


def sample(name: str, spec: Task, length: int, index: int, seed: int = 0) -> Sample:
    """As ``make``, for a task that need not be listed."""
    if not SHORTEST <= length <= LONGEST:
        raise RequestError(f"length={length} must be from {SHORTEST} to {LONGEST} tokens")
    rng = Rng("suite", VERSION, spec.world.__name__, spec.shared, length, seed, index)
    source = prose(f"suite{seed}")
    budget = int(length * spec.share)
    while True:
        world = spec.world(Plan(rng, budget, spec.wanted, source))
        bin_ = index * 3 % DEPTHS  # any few samples in a row are spread
        world.questions = world.questions if spec.turns > 1 else world.questions[: spec.asked]
        target = min(world.questions[0].needs, default=0)
        depths = compose.place(rng, world, (target, bin_ / DEPTHS, (bin_ + 1) / DEPTHS))
        stretches = compose.plan_turns(
            rng, world, depths, compose.borders(spec.turns), spec.asked, (spec.position,)
        )  # fmt: skip
        spare = length - compose.cost(world, stretches)
        if len(stretches) == spec.turns and spare >= 0:
            break
        budget = budget * 9 // 10
    conversation = compose.messages(rng, world, depths, stretches, spare, source)
    turns = tuple(_turn(message) for message in conversation)
    return Sample(name, length, index, seed, turns, spec.shared, {"depth": round(depths[target], 4)})


def _turn(message: compose.Message) -> Turn:
    question = message.question
    kept = [answer[: question.scored] for answer in question.answers]
    return Turn(
        context=tuple(v.text(half) for half in message.halves if half),
        question=v.text(question.ids),
        answers=tuple(v.text(answer).strip() for answer in kept),
        metric=question.metric,
        max_new_tokens=len(question.reply()) + 4,
        position=message.position,
        meta={"gold": v.text(question.reply())},
    )
