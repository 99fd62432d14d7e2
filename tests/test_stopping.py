"""Stop strings are looked for in time linear in the text, whatever they repeat, and nothing of one is ever shown."""

from __future__ import annotations

import random

import pytest

from saccade.engine.sampling import stopping
from saccade.engine.sampling.stopping import StopText


def held(text: str, stops: list[str]) -> int:
    """The longest beginning of a stop string, itself aside, that ``text`` ends with."""
    return max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))


@pytest.mark.parametrize("counts", [True, False])
def test_what_may_become_a_stop_string_is_held_back_and_no_more(counts):
    rng = random.Random(1)
    for _ in range(300):
        letters = "ab" if rng.random() < 0.7 else "abc"
        stops = ["".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(rng.randint(1, 3))]
        watch, text, shown = StopText(stops), "", ""
        for _ in range(40):
            piece = "".join(rng.choices(letters, k=rng.randint(0, 4)))
            text += piece
            met = watch.add(piece, counts)
            assert met == (counts and any(stop in text for stop in stops))
            if met:
                ends = min(text.find(stop) for stop in stops if stop in text)
                assert shown + watch.release(final=True) == text[:ends]
                break
            shown += watch.release(final=False)
            assert len(text) - len(shown) == held(text, stops)
        else:
            assert shown + watch.release(final=True) == text


@pytest.mark.parametrize("text", ["a", "ab", "aab"])
def test_each_letter_is_looked_at_a_few_times(text):
    looked = [0]

    class Counted(str):
        __slots__ = ()

        def __getitem__(self, place):
            looked[0] += 1
            return str.__getitem__(self, place)

    costs = []
    for size in (2000, 4000):
        looked[0], watch = 0, stopping._Beginning(Counted("a" * 1000 + "c"))
        for _ in range(size):
            watch.add(text)
        costs.append(looked[0] / len(text * size))
    assert costs[1] < 1.5 * costs[0] + 1
    assert costs[1] < 10
