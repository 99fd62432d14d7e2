"""Few-shot items over a real text: its own questions, and what each asks for by its first word, as TREC's classes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from saccade.eval.multiturn.rng import Stream

LEAST = 8  # questions of a text
_WORDS = (3, 25)  # of a question
_FRAME = 24  # characters around a question in an example
_CLASSES = {
    "person": "who whom whose",
    "place": "where",
    "time": "when",
    "manner": "how",
    "reason": "why",
    "thing": "what which",
    "yes or no": "do does did is are was were am have has had can could will would shall should may might must",
}
_KINDS = {word: kind for kind, words in _CLASSES.items() for word in words.split()}
_OPENING = re.compile(r"^[^\w]+")
_ASKS = re.compile(r"\?[\"'”’)]*$")
_INNER = re.compile(r"[\"“:]")  # what quotes a question is none


@dataclass(frozen=True)
class Asked:
    """A question and its class."""

    text: str
    kind: str


@lru_cache(maxsize=4)
def find(sentences: Sequence[str]) -> tuple[Asked, ...]:
    """The questions among ``sentences`` of 3 to 25 words that begin with a question word, quotation marks left out."""
    found: dict[str, Asked] = {}
    for sentence in sentences:
        text = _OPENING.sub("", sentence)
        ends = _ASKS.search(text)
        words = text.split()
        kind = _KINDS.get(words[0].lower().strip(",")) if words else None
        if ends is not None and kind is not None and _WORDS[0] <= len(words) <= _WORDS[1]:
            text = text[: ends.start()] + "?"
            if not _INNER.search(text):
                found.setdefault(text, Asked(text, kind))
    return tuple(found.values())


def questions_of(
    sentences: Sequence[str], stream: Stream, characters: int
) -> tuple[Asked, list[Asked], tuple[str, ...]] | None:
    """(the question asked, examples of about ``characters`` characters, the classes). Classes take turns, so that none
    is rare; the question is not among the examples, and one example has its class. None for a text with fewer than 8
    questions or two classes."""
    order = list(find(tuple(sentences)))
    stream.shuffle(order)
    by_kind = {kind: [one for one in order if one.kind == kind] for kind in _CLASSES}
    kinds = [kind for kind, own in by_kind.items() if len(own) > 1]
    if len(order) < LEAST or len(kinds) < 2:
        return None
    question = by_kind[kinds[stream.below(len(kinds))]].pop()
    shots: list[Asked] = []
    while sum(len(one.text) + _FRAME for one in shots) < characters and any(by_kind[kind] for kind in kinds):
        shots += [by_kind[kind].pop() for kind in kinds if by_kind[kind]]
    stream.shuffle(shots)
    return question, shots, tuple(kinds)
