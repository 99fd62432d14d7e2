"""Lays a world's items out in a context of exact length and asks its questions, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from saccade.eval.suite.filler import Prose, background
from saccade.eval.suite.rng import Rng
from saccade.eval.suite.worlds import Question, World

BACKGROUND, GIVEN, TAUGHT = 0, 1, 2  # kinds of token: filler, what nothing foretells, what the context determines
_FRAME = 4  # tokens a turn takes besides its text: user, end, assistant, end


@dataclass
class Message:
    """A user message, in two halves whose border lies between items, and its question. ``kinds`` as ``ids``."""

    halves: tuple[list[int], list[int]]
    kinds: tuple[list[int], list[int]]
    question: Question
    position: str

    def parts(self) -> list[tuple[list[int], list[int]]]:
        asked = (self.question.ids, [GIVEN] * len(self.question.ids))
        halves = list(zip(self.halves, self.kinds))
        halves.insert({"begin": 0, "middle": 1, "end": 2}[self.position], asked)
        return halves


@dataclass
class _Stretch:
    """Part of the context, between two borders, and the questions that follow it."""

    start: float
    stop: float
    items: list[int] = field(default_factory=list)
    asked: list[tuple[Question, str]] = field(default_factory=list)


def place(rng: Rng, world: World, depth: tuple[int, float, float] | None = None) -> list[float]:
    """A depth in [0, 1) for each item. ``depth``: the item that has to lie between two shares of the context."""
    depths = [low + (high - low) * rng.random() for low, high in world.depths or [(0.0, 1.0)] * len(world.items)]
    if depth is not None:
        item, low, high = depth
        first, last = world.depths[item] if world.depths else (0.0, 1.0)
        depths[item] = first + (last - first) * (low + (high - low) * rng.random())
    for group in world.groups:
        for item, value in zip(group, sorted(depths[item] for item in group)):
            depths[item] = value
    return depths


def plan_turns(
    rng: Rng, world: World, depths: Sequence[float], borders: Sequence[float], most: int, positions: Sequence[str]
) -> list[_Stretch]:
    """Spread questions over the stretches that end at ``borders``: each where all it needs has been read, at most
    ``most`` altogether and at least one a stretch (a stretch without any joins the next)."""
    stretches: list[_Stretch] = []
    left = list(world.questions)
    start = 0.0
    for number, stop in enumerate(borders):
        ready = [
            q for q in left
            if all(depths[i] < stop for i in q.needs) and (q.before is None or depths[q.before] >= stop)
        ]  # fmt: skip
        if not ready:
            continue
        later = len(borders) - number - 1
        room = max(1, most - later - sum(len(s.asked) for s in stretches))
        take = len(ready) if later == 0 else rng.between(1, max(1, len(ready) // 2))
        stretch = _Stretch(start, stop)
        stretch.items = sorted((i for i, d in enumerate(depths) if start <= d < stop), key=depths.__getitem__)
        stretch.asked = [(q, rng.choice(positions)) for q in ready[: min(take, room)]]
        for question, _ in stretch.asked:
            left.remove(question)
        stretches.append(stretch)
        start = stop
    return stretches


def cost(world: World, stretches: Sequence[_Stretch]) -> int:
    """Tokens of the whole conversation without background."""
    tokens = 1
    for stretch in stretches:
        tokens += sum(len(world.items[i].ids) for i in stretch.items)
        tokens += sum(_FRAME + len(q.ids) + len(q.reply()) for q, _ in stretch.asked)
    return tokens


def messages(
    rng: Rng, world: World, depths: Sequence[float], stretches: Sequence[_Stretch], spare: int, source: Prose
) -> list[Message]:
    """The conversation with ``spare`` tokens of background, spread evenly over the context."""
    filler = background(rng, spare, source, repeat=world.repeat)
    end = stretches[-1].stop
    out: list[Message] = []
    for stretch in stretches:
        ids: list[int] = []
        kinds: list[int] = []
        seams: list[int] = []
        done = int(stretch.start / end * spare)
        last = spare if stretch.stop == end else int(stretch.stop / end * spare)
        halfway = (done + last) // 2
        for item in stretch.items:
            at = min(int(depths[item] / end * spare), last)
            for cut in (halfway, at):
                if done < cut <= at or cut == at:
                    ids += filler[done:cut]
                    kinds += [BACKGROUND] * (cut - done)
                    done = cut
                    seams.append(len(ids))
            planted = world.items[item]
            marks = [GIVEN] * len(planted.ids)
            for offset in planted.taught:
                marks[offset] = TAUGHT
            ids += planted.ids
            kinds += marks
            seams.append(len(ids))
        for cut in (halfway, last):
            if cut > done:
                ids += filler[done:cut]
                kinds += [BACKGROUND] * (cut - done)
                done = cut
                seams.append(len(ids))
        middle = min(seams, key=lambda seam: abs(2 * seam - len(ids)), default=0)
        (first, position), *others = stretch.asked
        out.append(Message((ids[:middle], ids[middle:]), (kinds[:middle], kinds[middle:]), first, position))
        out += [Message(([], []), ([], []), question, "end") for question, _ in others]
    return out


def borders(count: int) -> list[float]:
    """``count`` equal stretches."""
    return [(i + 1) / count for i in range(count)]
