"""Choosing pages (blocks of keys) by what their summaries say of a decode step's query: Quest's and ArkVale's way."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.summaries import summarize
from saccade.methods.base import Query
from saccade.ops.block_scores import top_blocks
from saccade.selection import Blocks, Dense, Selection

UNITS = ("q_head", "kv_head", "layer")


def top_pages(query: Query, kind: str, size: int, unit: str, count: int, first: int, last: int) -> Selection:
    """``count`` pages of ``size`` keys per unit: the ``first`` first and ``last`` last ones, and of the others those of
    highest score against the summary ``kind``, meaned over the unit's query heads, ties to the lower page. Dense where
    that is every page."""
    shape = query.shape
    pages = -(-shape.k_len // size)
    ranked = count - first - last
    if count >= pages or first + last >= pages:
        return Dense(shape)
    units = {"q_head": shape.heads, "kv_head": shape.kv_heads, "layer": 1}[unit]
    ends = torch.arange(first, dtype=torch.int32), torch.arange(pages - last, pages, dtype=torch.int32)
    forced = torch.cat(ends).expand(units, -1)
    if ranked <= 0:
        return _blocks(query, size, forced)
    tail = None
    if last == 0 and shape.k_len % size:
        tail = summarize(query.kv.keys(shape.k_len // size * size), kind)  # [parts, G, d]
    query.cost.estimated += pages - last - first
    best = top_blocks(query.q[:, 0], query.kv.summary(kind, size), units, ranked, first, pages - last, tail)
    return _blocks(query, size, torch.cat([forced[:, :first], best, forced[:, first:]], 1))


def _blocks(query: Query, size: int, pages: Tensor) -> Blocks:
    """``pages`` int32 [units, m], rising."""
    units, count = pages.shape
    return Blocks(query.shape, size, torch.arange(units + 1) * count, pages.flatten())
