"""Packed numbers that a host writes and kernels read, by name (ops/triton/state_words.py): addresses are in bytes."""

from __future__ import annotations

from typing import NamedTuple


class KeyWords(NamedTuple):
    """Words of rows that choose keys, or blocks by labels of their keys; 0 what a method has none of. ``k`` 0: a share,
    which is the first of the reals."""

    k: int = 0
    sinks: int = 0
    local: int = 0
    channels: int = 0  # address of int64 [kv_heads, r]
    codes: int = 0  # address
    ranges: int = 0  # address
    room: int = 0  # of codes and ranges, in tiles, or keys where labels are whole
    frame: int = 0  # address of fp32 [2, kv_heads, r]
    every: int = 0  # steps between two choices
    sets: int = 0  # address of int32 [units, k]
    since: int = 0  # address of the length, int64, that a set was made at, 0 for none
    other_sets: int = 0  # addresses of those of the layer whose sets it takes
    other_since: int = 0
    donors: int = 0  # address of int32 [units]: whose set each unit takes
    dense_upto: int = 0  # rows of up to so many keys read everything


class KeptWords(NamedTuple):
    """Words of rows whose lists are kept for good: a list gains an entry with each key from length ``since`` on."""

    lists: int  # address of int32 [units, m]
    width: int  # m
    counts: int  # address of int64 [units]: entries that count at length ``since``
    since: int


class ConeNumbers(NamedTuple):
    """A row's window (selection.Cone), float64; all 0: none."""

    share: float = 0.0
    sinks: float = 0.0
    local: float = 0.0
    grid: float = 0.0


class TapWords(NamedTuple):
    """Where a row's queries and results [heads, head_dim] and log-sum-exps [heads] begin, int64 addresses, each with
    how many elements lie between its heads."""

    q: int
    q_head: int
    out: int
    out_head: int
    lse: int
    lse_head: int


class AuditPlace(NamedTuple):
    """What is held against true attention, int32: one KV head of a row; ``window`` 0 for none."""

    layer: int
    row: int
    kv_head: int
    window: int
