"""Tasks of long generation with a checkable end: hundreds of lines' worth of looking up, adding, and copying.

A needle is one look-up. Here an answer of 500 to 2,000 tokens needs its material again at every line, and its own last
line too, so a cache that has lost either shows it. The material lies among prose, or a user's text: in one piece whose
depth goes round the tenths of the context with the index, or scattered over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saccade.errors import RequestError
from saccade.eval.haystack import split_sentences
from saccade.eval.lengths import LEAST, Lengths, fit
from saccade.eval.longgen.tasks import SHOWN, TASKS, Draft
from saccade.eval.natural.texts import Words
from saccade.eval.ruler.drafts import place
from saccade.eval.samples import Sample, Turn
from saccade.eval.suite.rng import Rng

__all__ = ["TASKS", "VERSION", "make"]

VERSION = "1"

_SHORT, _LONG = 512, 1536  # tokens of an answer: at 2K, and at most; a fifth of the length between them
_LEAST_LINES = 8
_MOST_NEW = 2048


def make(
    task: str,
    length: int,
    index: int,
    seed: int = 0,
    *,
    lengths: Lengths,
    haystack: str = "prose",
) -> Sample:
    """Sample ``index`` of a task: one turn that is ``length`` tokens long, within 1 %, with what is to be generated.

    A function of its arguments alone. ``lengths``: how the model to be tested reads samples. ``haystack``: "prose", or
    "file:PATH" (UTF-8). The turn's ``answers`` are the lines that should be generated, its ``meta`` has their ``gold``
    text, ``depth`` (where the pieces of the material lie, 0..1) and ``steps`` (lines to be generated); the sample's
    has ``version`` and ``tokens``, the length reached.

    Raises RequestError for an unknown task, a length that holds fewer than eight lines, or a text that runs out.
    """
    if task not in TASKS:
        raise RequestError(f"task={task!r} is unknown; known: {', '.join(TASKS)}")
    chosen = TASKS[task]
    rng = Rng("longgen", VERSION, task, length, seed, index)
    count_tokens = lengths.count_tokens
    filler = _Filler(Words(haystack, length, rng.below(2**32)))
    drawn = chosen.drawn(rng, index)
    draft = drawn(_lines(drawn, chosen.most, length, count_tokens))
    answers = draft.lines[SHOWN:]
    gold = count_tokens(_text(answers))
    new_tokens = min(gold + gold // 8 + 16, length // 2, _MOST_NEW)
    meta = {"depth": [round(depth, 4) for depth in draft.depths], "gold": _text(answers), "steps": len(answers)}

    def turn(words: int) -> Turn:
        context = (filler.around(words, draft.head, draft.blocks, draft.depths),)
        opening = _text(draft.lines[:SHOWN])
        return Turn(context, f"{draft.question}\n\n", answers, chosen.metric, new_tokens, "end", opening, meta)

    try:
        words, reached = fit(lambda words: lengths.of([turn(words)]), length, 0, filler.most)
    except RequestError as error:
        raise RequestError(f"{task} at length={length}: {error}") from None
    if reached < LEAST * length:
        raise RequestError(
            f"{task} reaches only {reached} of length={length} tokens: {haystack} runs out after {words} words; ask "
            "for a shorter length"
        )
    return Sample(task, length, index, seed, (turn(words),), meta={"version": VERSION, "tokens": reached})


def _lines(drawn: Callable[[int], Draft], most: int, length: int, count_tokens: Callable[[str], int]) -> int:
    """As many lines as fit the tokens that an answer may have at this length."""
    limit = min(_LONG, max(length // 5, min(_SHORT, length // 4)))
    used = 0
    for count, line in enumerate(drawn(most).lines[SHOWN:], 1):
        used += count_tokens(line + "\n")
        if used > limit:
            if count <= _LEAST_LINES:
                raise RequestError(
                    f"length={length} leaves {limit} tokens for {count - 1} lines; ask for at least 1024"
                )
            return SHOWN + count - 1
    return most


def _text(lines: tuple[str, ...]) -> str:
    return "".join(line + "\n" for line in lines)


class _Filler:
    """A text's first so many words, cut so that a sample has its length, with blocks among its sentences."""

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
