"""The text that drift is measured over: a context that is prefilled, and tokens that are forced after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from saccade import prose
from saccade.errors import RequestError
from saccade.facts import make_facts, plant

FACTS = 8  # in the text that is made where none is given
CHARS = 4.5  # a token has about so many letters, to begin with

Encode = Callable[[str, bool], list[int]]  # text, whether it begins a context


@dataclass(frozen=True)
class Passage:
    """``ids``: the tokens. The first ``context`` are prefilled, all others but the last are forced as decode steps: the
    step of each is held against dense, and against the token that comes after it."""

    ids: tuple[int, ...]
    context: int

    @property
    def steps(self) -> int:
        """Decode steps: forced tokens."""
        return len(self.ids) - self.context - 1

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that the steps predict."""
        return self.ids[self.context + 1 :]


def passage_of(text: str, encode: Encode, length: int, steps: int, name: str = "the text") -> Passage:
    """The first ``length`` tokens of ``text``, the last ``steps`` of them forced, and one token more to be predicted.
    RequestError where the text is shorter."""
    check_lengths(length, steps)
    if not text.strip():
        raise RequestError(f"{name} is empty; give a text of {length + 1} tokens")
    ids = encode(text, True)
    if len(ids) < length + 1:
        least = steps + 2
        way = f"give a longer text, or --length {len(ids) - 1} at most" if len(ids) > least else "give a longer text"
        raise RequestError(
            f"{name} has {len(ids)} tokens, and --length {length} takes {length + 1}, the last to be predicted; {way}"
        )
    return Passage(tuple(ids[: length + 1]), length - steps)


def made_passage(encode: Encode, length: int, steps: int, seed: int) -> Passage:
    """A text that needs no file: generated prose (``saccade.prose``) with planted facts (``saccade.facts``), after
    which other prose goes on in which each fact is said again: what is forced takes looking things up. The context may
    be a few tokens shorter than ``length - steps``, as it ends with a sentence."""
    check_lengths(length, steps)
    facts, context = make_facts(FACTS, seed), length - steps
    chars = int(CHARS * context)
    while True:
        body = plant(prose.generate(max(0, chars), seed), facts, seed)
        ids = encode(body, True)
        if len(ids) <= context:
            break
        chars = min(chars - 64, int(chars * context / len(ids)))
        if chars <= 0:
            raise RequestError(
                f"--length {length} with {steps} forced tokens leaves no room for the {FACTS} facts of the made text; "
                "give a larger --length, fewer --tokens, or a text with -f"
            )
    told: list[int] = []
    round = 0
    while len(told) < steps + 1:
        round += 1
        between = prose.generate(1200, seed + round).replace("\n", " ").split(". ")
        for fact, sentence in zip(facts, between):
            told += encode(f" {sentence.rstrip('.')}. {fact.sentence}", False)
    return Passage((*ids, *told[: steps + 1]), len(ids))


def check_lengths(length: int, steps: int) -> None:
    """RequestError unless the forced tokens leave a context."""
    if steps < 1 or length < steps + 2:
        raise RequestError(
            f"--length {length} with --tokens {steps} is not possible; at least one token is forced, and a context of "
            "two or more comes before"
        )
