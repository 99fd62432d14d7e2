"""Rows of LFPS's recorded steps, and what is the best of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from saccade.methods.device_state import REALS, WORDS, Opening
from saccade.methods.lfps import LFPS
from saccade.methods.lfps.recorded import Reals, RecordedTables
from saccade.methods.lfps.state import LFPSState
from saccade.methods.lfps.tables import ScoreTables
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.decode import Pages

HEADS, KV_HEADS, LENGTHS, LONGEST, PAGE, DIM = 4, 2, [0, 77, 250], 256, 16, 16


def opened(
    method: LFPS,
    units: int,
    rng: torch.Generator,
    lengths: Sequence[int] = LENGTHS,
    longest: int = LONGEST,
    device: str = "cpu",
) -> tuple[LayerRows, list]:
    """Rows with tables of their own, few of whose entries are large; 0: padding. And the states behind them."""
    count = len(lengths)
    words, reals = torch.zeros(count, WORDS, dtype=torch.int64), torch.zeros(count, REALS, dtype=torch.float64)
    states: list = [None] * count
    where = torch.device(device)
    for row, length in enumerate(lengths):
        if length:
            sinks = method.sinks
            vertical, slash = (torch.rand(2, units, length - 1 - sinks, generator=rng) ** 40).to(where)
            tables = ScoreTables.of(vertical, slash, sinks, length - 2)
            nothing = torch.zeros(KV_HEADS, DIM, device=where)
            state = LFPSState(tables, nothing, nothing, 0, torch.zeros(HEADS, device=where), length - 1)
            kv = SimpleNamespace(pool=SimpleNamespace(storage=SimpleNamespace(device=where)))
            states[row] = RecordedTables(Opening([state], kv, SimpleNamespace(), 0, length), method)
            words[row, : len(states[row].words(0))] = torch.tensor(states[row].words(0))
            reals[row, : len(Reals._fields)] = torch.tensor(states[row].reals(0), dtype=torch.float64)
    slots = 40
    pool = torch.randn(slots, KV_HEADS, PAGE, DIM, generator=rng).to(where)
    table = torch.randperm(slots, generator=rng).repeat(-(-longest // PAGE // slots) + 1)[: longest // PAGE]
    table = table.to(where, torch.int32).repeat(count, 1, 1)
    pages = Pages(pool, pool, table, torch.tensor(lengths, dtype=torch.int32, device=where), longest)
    q, none = torch.zeros(count, HEADS, DIM, device=where), torch.zeros(count, dtype=torch.int32, device=where)
    scored = torch.zeros(count, 4, dtype=torch.float64, device=where)
    return LayerRows(0, q, pages, words.to(where), reals.to(where), scored, none, none, 1.0), states


def best_by_sorting(ranks: torch.Tensor, take: int) -> list[int]:
    return sorted(torch.sort(ranks, descending=True, stable=True).indices[: max(0, take)].tolist())
