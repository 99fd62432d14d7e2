"""Choosing pages (blocks of keys) by what their summaries say of a decode step's query: Quest's and ArkVale's way."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from saccade.kv.summaries import summarize
from saccade.methods.base import Query
from saccade.ops.block_scores import block_scores, top_blocks
from saccade.ops.scores import top_places
from saccade.selection import Blocks, Dense, Selection
from saccade.selection.forms import Summarized
from saccade.selection.readings import Choice

UNITS = ("q_head", "kv_head", "layer")


class Heads(Protocol):
    """A call's shape, or a model's."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...


def units_of(unit: str, shape: Heads) -> int:
    """Lists that one of ``UNITS`` means."""
    return {"q_head": shape.heads, "kv_head": shape.kv_heads, "layer": 1}[unit]


@lru_cache
def page_choice(kind: str, size: int, units: int, budget: int, first: int, last: int, least: int = 1) -> Choice:
    """``budget`` keys in pages of ``size``, at least ``least`` pages: the ``first`` first and ``last`` last ones, and
    the best others by the summary ``kind``. Rows that this leaves nothing to skip read everything."""
    count = max(least, budget // size)
    dense_upto = max(budget, count * size, (first + last) * size)
    return Choice(Summarized(size, kind), units, first, last, dense_upto, take=max(0, count - first - last))


def top_pages(query: Query, choice: Choice, joins_heads: bool = False) -> Selection:
    """The pages that ``choice`` means for one row. ``joins_heads``: its one unit is all heads of the layer, in
    whichever process they are."""
    shape, size, first, last = query.shape, choice.size, choice.first, choice.last
    if shape.k_len <= choice.dense_upto:
        return Dense(shape)
    pages = -(-shape.k_len // size)
    before, behind = ends_of(query, choice)
    if not choice.take:
        return blocks_of(query, size, torch.cat([before, behind], 1))
    tail = None
    if last == 0 and shape.k_len % size:
        tail = summarize(query.kv.keys(shape.k_len // size * size), choice.source.summary)  # [parts, G, d]
    query.cost.estimated += pages - last - first
    summary = query.kv.summary(choice.source.summary, size)
    codes = query.kv.codes(choice.source.summary, size)
    if joins_heads and not query.part.is_whole:
        if tail is not None:
            summary = torch.cat([summary, tail[None].to(summary.dtype)])
        own = block_scores(query.q[:, 0], summary[first : pages - last], query.shape.heads)
        best = (top_places(query.all_heads(own).mean(0, keepdim=True), choice.take) + first).to(torch.int32)
    else:
        best = top_blocks(query.q[:, 0], summary, choice.units, choice.take, first, pages - last, tail, codes)
    return blocks_of(query, size, torch.cat([before, best, behind], 1))


def ends_of(query: Query, choice: Choice) -> tuple[Tensor, Tensor]:
    """The first and the last pages that are read anyway: int32 [units, count] each."""
    pages, device = -(-query.shape.k_len // choice.size), query.q.device
    first = torch.arange(choice.first, dtype=torch.int32, device=device)
    last = torch.arange(pages - choice.last, pages, dtype=torch.int32, device=device)
    return first.expand(choice.units, -1), last.expand(choice.units, -1)


def blocks_of(query: Query, size: int, pages: Tensor) -> Blocks:
    """``pages`` int32 [units, m], rising."""
    units, count = pages.shape
    return Blocks(query.shape, size, torch.arange(units + 1, device=pages.device) * count, pages.flatten())
