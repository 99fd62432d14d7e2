"""What a world is made of: items to be spread over a context, questions about them, and the plan it is made by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from saccade.eval.suite.filler import NEWLINE, Prose
from saccade.eval.suite.rng import Rng
from saccade.models.reference import vocabulary as v

_COMMA, _ASK = (v.char(symbol) for symbol in ",?")
ADJECTIVES = v.NOUN - v.ADJECTIVE
NOUNS = v.FILLER - v.NOUN
_PAIRS = ADJECTIVES * NOUNS

Key = tuple[int, int]


@dataclass
class Item:
    """Tokens that stay together. ``taught``: offsets of tokens that follow from the context before them."""

    ids: list[int]
    taught: Sequence[int] = ()


@dataclass
class Question:
    """``ids``: the question; ``answers``: the references, each a list of ids, said one after the other with commas
    between them where there are several; ``needs``: the items without which it has no answer."""

    ids: list[int]
    answers: list[list[int]]
    metric: str
    needs: list[int]
    before: int | None = None  # an item that makes the answer wrong once it has been read
    scored: int | None = None  # leading tokens of the answer that count; the rest is practice in training

    def reply(self) -> list[int]:
        """The assistant's whole message."""
        out = list(self.answers[0])
        for answer in self.answers[1:]:
            out += [*([] if answer[0] >= v.ADJECTIVE else [_COMMA]), *answer]
        return out


@dataclass
class World:
    items: list[Item]
    questions: list[Question] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)  # items that keep their order
    depths: list[tuple[float, float]] | None = None  # where each item may lie, as shares of the whole context
    repeat: bool = False  # the background is one sentence over and over


@dataclass
class Plan:
    """``budget``: about how many tokens the items may take. ``wanted``: questions, at least. ``held_out``: whether
    keys may be such as training never shows (one in ten)."""

    rng: Rng
    budget: int
    wanted: int
    prose: Prose
    held_out: bool = True

    def keys(self, count: int) -> list[Key]:
        """Distinct pairs of adjective and noun."""
        if self.held_out:
            return [_key(number) for number in self.rng.distinct(_PAIRS, count)]
        numbers = [number for number in self.rng.distinct(_PAIRS, count + count // 4 + 16) if not held_out(number)]
        return [_key(number) for number in numbers[:count]]


def ask(command: str, rest: Sequence[int]) -> list[int]:
    """A question: a line of its own."""
    return [NEWLINE, _ASK, v.word(command), *rest, NEWLINE]


def held_out(number: int) -> bool:
    """Whether training never shows this pair."""
    return (number * 2654435761 >> 7) % 10 == 0


def _key(number: int) -> Key:
    return v.ADJECTIVE + number // NOUNS, v.NOUN + number % NOUNS
