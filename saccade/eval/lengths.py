"""How long a sample is: its tokens as the model reads them, chat template and room for answers included.

Samples are drawn as functions of a size (words, lines, documents), and ``fit`` finds the size for a length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import RequestError
from saccade.eval.render import Exchange, render
from saccade.eval.samples import Turn

LEAST = 0.99  # of a length is reached, unless a task says otherwise
_AIM = 0.995


@dataclass(frozen=True)
class Lengths:
    """How samples are measured. ``tokenizer``: a model's, whose chat template is counted if it has one. Without it
    ``count_tokens`` counts texts, and no template."""

    count_tokens: Callable[[str], int]
    tokenizer: Any | None = None

    @property
    def chat(self) -> bool:
        """Whether messages go through a chat template, as far as is known."""
        return self.tokenizer is None or bool(self.tokenizer.has_chat_template)

    def of(self, turns: Sequence[Turn], shared: bool = False) -> int:
        """Tokens of a sample: what its last prompt has if every earlier answer takes all the room that it may, and the
        room for the last answer. With ``shared``: of the longest of its prompts, each with its own answer."""
        if shared:
            first = turns[0]
            asked = max(turns, key=lambda turn: self.count_tokens(turn.question + turn.prefix) + turn.max_new_tokens)
            one = Turn(first.context, asked.question, (), "", 0, asked.position, asked.prefix, asked.meta)
            return self._prompt([], one) + asked.max_new_tokens
        history = [Exchange(turn.message(), turn.prefix) for turn in turns[:-1]]
        return self._prompt(history, turns[-1]) + sum(turn.max_new_tokens for turn in turns)

    def _prompt(self, history: Sequence[Exchange], turn: Turn) -> int:
        if self.tokenizer is not None:
            return len(render(self.tokenizer, history, turn, keep=False).ids)
        said = [part for exchange in history for part in (exchange.message, exchange.answer)]
        return self.count_tokens(" ".join([*said, turn.message(), turn.prefix]))


def fit(measure: Callable[[int], int], budget: int, least: int = 0, most: int | None = None) -> tuple[int, int]:
    """(size, tokens): a size from ``least`` to ``most`` whose ``measure`` in tokens is at most ``budget``, and at least
    99 % of it if sizes are fine enough, else the largest found.

    ``measure`` grows with the size, but for a few tokens. Raises RequestError if the least size is too long.
    """
    size, tokens = least, measure(least)
    if tokens > budget:
        raise RequestError(f"{tokens} tokens at least do not fit the {budget} there are; ask for a larger length")
    first = (size, tokens)
    over: tuple[int, int] | None = None if most is None else (most + 1, -1)  # its tokens are unknown
    missed = 0
    while tokens < LEAST * budget and (over is None or over[0] - size > 1):
        wanted = _AIM * budget - tokens
        if over is not None and over[1] > 0:
            slope = (over[1] - tokens) / (over[0] - size)
            guess = size + int(wanted / slope) if missed % 2 else (size + over[0]) // 2
        elif size == first[0]:
            guess = 2 * size + 8
        else:
            guess = size + int(wanted / max((tokens - first[1]) / (size - first[0]), 1e-3))
        guess = max(guess, size + 1)
        if over is not None:
            guess = min(guess, over[0] - 1)
        found = measure(guess)
        if found > budget:
            over, missed = (guess, found), missed + 1
        else:
            size, tokens = guess, found
    return size, tokens
