"""A text over which a tiny model drifts, for the tests of drift."""

from __future__ import annotations

from saccade.passage import Passage, passage_of

LONG = " ".join(f"line {at}," for at in range(400))
TEXT = " ".join(f"the {word} of line {at} is {at * at % 97};" for at in range(12) for word in ("sum", "name", "end"))
STREAMING = "prefill=dense, decode=streaming(sinks=3, window=20)"
LENGTH, STEPS = 200, 12


def passage(llm) -> Passage:
    return passage_of(TEXT, llm.encode, LENGTH, STEPS)
