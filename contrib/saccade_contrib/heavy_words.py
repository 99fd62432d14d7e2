"""Packed numbers of H2O's rows, which a host writes and kernels read by name (saccade.ops.triton.state_words)."""

from __future__ import annotations

from typing import NamedTuple


class HeavyWords(NamedTuple):
    """Words of a row, by unit: addresses of int32 ``keys`` [units, m], of float32 ``sums`` and ``pending`` weights
    [units, m] and of int64 ``marks`` [units, 3]: entries; the length up to which keys are listed, and weighed."""

    keys: int
    sums: int
    pending: int
    marks: int
    width: int  # m
    budget: int
    recent: int  # last keys that are never evicted
