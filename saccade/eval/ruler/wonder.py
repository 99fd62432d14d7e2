"""The word lists of the package ``wonderwords``, from which RULER's public generator draws."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib import metadata, resources
from itertools import accumulate
from typing import Any

from saccade.errors import RequestError

VERSION = "2.2.0"  # other versions have other words, and so other samples


def read_words(kind: str) -> list[str]:
    """The list ``nounlist``, ``adjectivelist`` or ``verblist``. Raises RequestError without wonderwords 2.2.0."""
    try:
        found = metadata.version("wonderwords")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise RequestError(
            f"RULER's own samples need wonderwords {VERSION} (found: {found}); install the extra: pip install "
            f"'saccade-llm[ruler]'"
        )
    text = (resources.files("wonderwords") / "assets" / f"{kind}.txt").read_text(encoding="utf-8")
    return [line.rstrip() for line in text.splitlines()]


class KeyWords(Sequence[str]):
    """All distinct adjective-noun pairs, sorted: 6 175 260 words that are not held in memory.

    Pairs sort by their adjective, except where one adjective with its hyphen begins another ("x-", "x-y-"): such
    adjectives form one group, whose pairs are laid out and sorted.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._groups: list[list[str]] = []
        for adjective in sorted(set(adjectives), key=lambda word: word + "-"):
            if self._groups and (adjective + "-").startswith(self._groups[-1][0] + "-"):
                self._groups[-1].append(adjective)
            else:
                self._groups.append([adjective])
        self._mixed = {
            number: sorted({f"{adjective}-{noun}" for adjective in group for noun in self._nouns})
            for number, group in enumerate(self._groups)
            if len(group) > 1
        }
        sizes = (len(self._mixed.get(number, self._nouns)) for number in range(len(self._groups)))
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        number = bisect_right(self._ends, index)
        within = index - (self._ends[number - 1] if number else 0)
        if number in self._mixed:
            return self._mixed[number][within]
        return f"{self._groups[number][0]}-{self._nouns[within]}"


@cache
def key_words() -> KeyWords:
    """RULER's keys of type "words"."""
    return KeyWords(read_words("adjectivelist"), read_words("nounlist"))


@cache
def common_words() -> tuple[str, ...]:
    """Distinct nouns, adjectives and verbs, sorted: 8169 words."""
    return tuple(sorted({word for kind in ("nounlist", "adjectivelist", "verblist") for word in read_words(kind)}))
