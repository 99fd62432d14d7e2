"""How the token of one row is to be chosen, as plain data, for code that chooses those of many rows at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class RowSampling(NamedTuple):
    """``temperature=0``: the likeliest token. The draw of any other is that of ``seed`` and ``sample`` at the token's
    place (:mod:`saccade.randomness`). ``logprobs``: so many of the likeliest tokens are wanted beside the chosen one.

    ``seen`` int64 [n]: the distinct tokens of the sequence, where ``repetition_penalty`` is not 1. ``answer``: the
    distinct tokens of the answer int64 [m] and how often each stands there int64 [m], where the other two penalties are
    not 0. ``banned``: tokens that may not come. ``biases``: tokens int64 [b] and what is added to them fp32 [b]."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    sample: int = 0
    logprobs: int | None = None
    seen: Tensor | None = None
    answer: tuple[Tensor, Tensor] | None = None
    banned: tuple[int, ...] = ()
    biases: tuple[Tensor, Tensor] | None = None


class TokenCounts:
    """How often each token stands in a list that only grows."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._tokens, self._counts = np.empty(64, np.int64), np.empty(64, np.int64)
        self._length = 0

    def of(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Distinct tokens int64 [n] in order of appearance, and how often each stands in ``ids``, int64 [n]. Valid
        until the next call."""
        self._add(ids[self._length :])
        self._length = len(ids)
        count = len(self._places)
        return torch.from_numpy(self._tokens[:count]), torch.from_numpy(self._counts[:count])

    def _add(self, ids: Iterable[int]) -> None:
        for token in ids:
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self._places)
                if place == len(self._tokens):
                    self._tokens, self._counts = (np.resize(one, 2 * place) for one in (self._tokens, self._counts))
                self._tokens[place], self._counts[place] = token, 0
            self._counts[place] += 1
