"""Text that stands around a task's material, cut to the word so that a sample has its length."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.eval.haystack import split_sentences
from saccade.eval.natural.texts import Words
from saccade.eval.ruler.drafts import place


class Filler:
    """A text's first so many words, with blocks among its sentences."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self.most = words.most

    def around(self, words: int, head: str, blocks: Sequence[str], depths: Sequence[float]) -> str:
        """``head``, then ``words`` words with ``blocks[i]`` as a paragraph at the share ``depths[i]`` of them."""
        own = set(blocks)
        paragraphs: list[list[str]] = [[head], []]
        for unit in place(split_sentences(self._words.first(words)), blocks, depths):
            paragraphs += [[unit], []] if unit in own else []
            if unit not in own:
                paragraphs[-1].append(unit)
        return "".join(" ".join(units) + "\n\n" for units in paragraphs if units)
