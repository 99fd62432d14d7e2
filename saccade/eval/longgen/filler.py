"""Text that stands around a task's material, cut to the word so that a sample has its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saccade.errors import RequestError
from saccade.eval.ruler.fit import place

_WITHIN = 0.005  # of the length that a sample may miss


class Filler:
    """``units(n)``: the first n sentences of a text, or fewer where it ends. ``name``: what errors call it."""

    def __init__(self, units: Callable[[int], Sequence[str]], name: str) -> None:
        self._units = units
        self._name = name

    def sentences(self, words: int) -> list[str]:
        """The text's first ``words`` words; a sentence that is cut ends with a full stop.

        Raises RequestError where the text has fewer.
        """
        found: list[str] = []
        asked = words // 8 + 1
        while words:
            given = self._units(asked)
            left, found = words, []
            for sentence in given:
                parts = sentence.split()
                if left <= len(parts):
                    return [*found, sentence if left == len(parts) else _cut(parts[:left])]
                found.append(sentence)
                left -= len(parts)
            if len(given) < asked:
                raise RequestError(f"{self._name} runs out after {words - left} words; ask for a shorter length")
            asked *= 2
        return found

    def around(self, words: int, head: str, blocks: Sequence[str], depths: Sequence[float]) -> str:
        """``head``, then ``words`` words with ``blocks[i]`` as a paragraph at the share ``depths[i]`` of them."""
        own = set(blocks)
        paragraphs: list[list[str]] = [[head], []]
        for unit in place(self.sentences(words), blocks, depths):
            paragraphs += [[unit], []] if unit in own else []
            if unit not in own:
                paragraphs[-1].append(unit)
        return "".join(" ".join(units) + "\n\n" for units in paragraphs if units)


def fitted(tokens: Callable[[int], int], length: int) -> tuple[int, int]:
    """(words, tokens of them): the most words found with at most ``length`` tokens and at least 99.5 % of it.

    Raises RequestError if no words at all are too many.
    """
    low, at_low = 0, tokens(0)
    if at_low > length:
        raise RequestError(f"the task alone has {at_low} tokens; ask for a longer one")
    high, at_high = length, tokens(length)
    while at_low < (1 - _WITHIN) * length and high - low > 1:
        slope = (at_high - at_low) / (high - low)
        words = low + int((length * (1 - _WITHIN / 4) - at_low) / slope)
        words = min(max(words, low + 1), high - 1)
        reached = tokens(words)
        if reached > length:
            high, at_high = words, reached
        else:
            low, at_low = words, reached
    return low, at_low


def _cut(words: Sequence[str]) -> str:
    return " ".join(words).rstrip(",;:.!?\"'”’") + "."
