"""Exact top-k's numbers on the device (methods/topk.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.row_words import KeyWords
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.best_parts import BOUNDS, put_bounds
from saccade.ops.triton.common import begin, launched
from saccade.ops.triton.state_words import places

W = places(KeyWords)


def bounds_of(rows: LayerRows) -> Tensor:
    """``choose_keys``'s bounds, by the first of KeyWords."""
    bounds = torch.empty(rows.count, BOUNDS, dtype=torch.int32, device=rows.q.device)
    _bound[(rows.count,)](
        rows.words,
        rows.reals,
        rows.pages.lengths,
        bounds,
        rows.words.stride(0),
        rows.reals.stride(0),
        num_warps=1,
        **launched(rows.q.device),
    )
    return bounds


@triton.jit
def budget_of(whole, share, keys):
    """``methods.options.budget_keys``, not cut to ``keys``: as many as ``whole`` says, or a share of ``keys``."""
    part = tl.ceil(share * keys.to(tl.float64) - 5e-10).to(tl.int32)  # 0.1 of 10 is 1, whatever fractions make of it
    return tl.where(whole > 0, whole, tl.maximum(part, 1))


@triton.jit(
    do_not_specialize=["word_row", "real_row"], do_not_specialize_on_alignment=["words", "reals", "lengths", "bounds"]
)
def _bound(words, reals, lengths, bounds, word_row, real_row, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    own = words + row.to(tl.int64) * word_row
    whole = tl.minimum(tl.load(own + W.k), 1 << 30).to(tl.int32)
    sinks = tl.minimum(tl.load(own + W.sinks), length.to(tl.int64)).to(tl.int32)
    local = tl.minimum(tl.load(own + W.local), length.to(tl.int64)).to(tl.int32)
    forced = tl.minimum(length, sinks + local)
    budget = tl.maximum(budget_of(whole, tl.load(reals + row.to(tl.int64) * real_row), length), forced)
    dense = (budget >= length) | (length <= tl.load(own + W.dense_upto))
    first = tl.where(dense, length, sinks)
    last = tl.where(dense, length, tl.maximum(first, length - local))
    put_bounds(bounds, row, first, last, 0, 0, tl.where(dense, 0, budget - forced))
