"""Tasks that the built-in retriever can do: facts planted in made-up prose, asked for by the beginning of a sentence.

They test the whole way from prepare to report without a trained model: under dense attention every answer is right.
One character is about one token of the retriever.
"""

from __future__ import annotations

from saccade.eval.samples import Sample, Turn
from saccade.facts import Fact, make_facts, plant
from saccade.prose import generate

VERSION = "1"
TASKS = {
    "single": "one fact of eight",
    "shared": "four facts of eight, each asked on its own over one context",
    "turns": "three turns with a text each; the second asks about the first text, the others about their own",
}
_FACTS = 8
_QUESTION = 120  # characters left for the question, its answer and the sentences planted
_SENTENCE = 56
_STOP = [".", "\n"]


def make(task: str, length: int, index: int, seed: int) -> Sample:
    """One sample of about ``length`` characters."""
    key = seed * 100_003 + index * 101 + length
    if task == "turns":
        texts = [_document(length // 3, key + part, 4) for part in range(3)]
        asked = ((0, 0), (0, 1), (2, 0))
        turns = tuple(_turn(texts[turn][0], *texts[part], which) for turn, (part, which) in enumerate(asked))
        return Sample(task, length, index, seed, turns)
    text, facts = _document(length, key, _FACTS)
    if task == "shared":
        first, *later = (_turn(text if which == 0 else "", text, facts, which) for which in range(4))
        return Sample(task, length, index, seed, (first, *later), shared=True)
    return Sample(task, length, index, seed, (_turn(text, text, facts, 0),))


def _document(length: int, key: int, count: int) -> tuple[str, list[Fact]]:
    facts = make_facts(count, key)
    return plant(generate(max(0, length - _QUESTION - _SENTENCE * count), key), facts, key) + "\n", facts


def _turn(context: str, source: str, facts: list[Fact], which: int) -> Turn:
    fact = facts[which]
    depth = source.index(fact.sentence) / max(1, len(source) - len(fact.sentence))
    meta = {"depth": round(depth, 4), "stop": _STOP}
    return Turn((context,) if context else (), "", (fact.value,), "exact", 32, "end", fact.question, meta)
