"""Tallies: what decode rows read and computed, as kernels count it. A tally is float64 [..., heads + BESIDE]: the keys
that each query head read, and beside them the places below. csrc/listing.h writes to it in this order, too."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SCORED, SEARCHES, ESTIMATED, COVERED, BESIDE = range(5)  # BESIDE: how many there are


class Counted(NamedTuple):
    """What was counted, a layer each: ``keys`` int64 [layers, heads] that were read, beyond those known for certain;
    float64 [layers] keys ``scored`` exactly, per query head, query heads that ``searches`` counts, stand-ins that were
    scored beside those that are known (``estimated``), and the sum of what stopping rules believed they ``covered``;
    ``least`` float32 [layers]: the least of it, 1 where there is none."""

    keys: Tensor
    scored: Tensor
    searches: Tensor
    estimated: Tensor
    covered: Tensor
    least: Tensor

    @classmethod
    def of(cls, tally: Tensor, least: Tensor | None = None) -> Counted:
        """Of float64 [layers, heads + BESIDE]."""
        heads = tally.shape[1] - BESIDE
        least = torch.ones(len(tally), device=tally.device) if least is None else least
        scored, searches, estimated, covered = tally[:, heads:].unbind(1)
        return cls(tally[:, :heads].round().long(), scored, searches, estimated, covered, least)

    @classmethod
    def ruled(cls, keys: Tensor, coverage: Tensor, heads: int) -> Counted:
        """Of stopping rules of several rows: ``keys`` int64 and ``coverage`` fp32 [rows, layers, units]."""
        each = keys.sum(0).repeat_interleave(heads // keys.shape[2], 1)
        none = torch.zeros(keys.shape[1], dtype=torch.float64, device=keys.device)
        return cls(each, none, none, none, coverage.double().sum((0, 2)), coverage.amin((0, 2)))

    def plus(self, other: Counted) -> Counted:
        sums = Counted(*(one + more for one, more in zip(self, other)))
        return sums._replace(least=self.least.minimum(other.least))
