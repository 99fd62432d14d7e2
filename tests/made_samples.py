"""Samples of tests of the evaluation harness: letters, and short answers."""

from __future__ import annotations

from saccade.eval.samples import Sample, Turn
from saccade.eval.sources import Source

QUESTION = "Q: which?"


def made(task: str, length: int, index: int, seed: int) -> Sample:
    """Letters that differ by index; two turns in ``chat``, three questions over one context in ``shared``."""
    text = "".join(chr(97 + (7 * i * i + index + seed) % 26) for i in range(length))
    first = Turn((text,), QUESTION, ("gold one",), "exact", 4, prefix="A:")
    if task == "chat":
        return Sample(task, length, index, seed, (first, Turn(("more ",), "and?", ("b",), "exact", 4, prefix="A:")))
    if task == "shared":
        later = [Turn((), question, ("b",), "exact", 3) for question in ("second?", "third one?")]
        return Sample(task, length, index, seed, (first, *later), shared=True)
    if task == "before":
        return Sample(task, length, index, seed, (Turn((text,), QUESTION, ("a",), "exact", 4, "begin"),))
    return Sample(task, length, index, seed, (first,))


SOURCES = {
    "made": lambda count: Source("made", "1", ("one", "chat", "shared", "before"), made),
    "suite": lambda count: Source("suite", "7", ("single",), made),
}
