"""What methods that score labels instead of keys share: which channels, and which tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.methods.base import Chunk, Query
from saccade.ops.scores import top_places
from saccade.selection import Shape, Tokens

CALIBRATION = "channels"  # mean |q| and |k| of every channel: see `saccade calibrate`
SOURCES = ("offline", "prompt")
CHANNELS_BY = ("qk", "q", "k")
PROMPT_ROWS = 64  # queries of the prompt that stand for all, with source=prompt


def heaviest_channels(segment: Chunk, by: str, count: int, source: str) -> Tensor:
    """The ``count`` channels of each KV head of greatest mean |q|, |k|, or |q k| over all pairs (``by``), ties to the
    lower: int64 [kv_heads, count]. From the calibration, or from the prompt's keys and last queries."""
    if source == "offline":
        assert segment.offline is not None, "the engine hands over the calibration that a method asks for"
        q, k = (segment.offline[name].to(segment.q.device) for name in ("q", "k"))
    else:
        q = segment.q.float().abs().mean(1).unflatten(0, (segment.shape.kv_heads, -1)).mean(1)
        k = segment.kv.keys().float().abs().mean(1)
    weight = {"q": q, "k": k, "qk": q * k}[by]
    return torch.sort(weight, dim=1, descending=True, stable=True).indices[:, :count]


def top_tokens(query: Query, scores: Tensor, count: int, sinks: int = 0, local: int = 0) -> Tokens:
    """The ``count`` keys of highest ``scores`` [units, k_len], ties to the lower, the first ``sinks`` and last
    ``local`` ones among them; at least those."""
    last = query.shape.k_len - local
    best = top_places(scores[:, sinks:last], max(0, count - sinks - local)) + sinks
    return around(query.shape, best.to(torch.int32), sinks, last)


def around(shape: Shape, middle: Tensor, first: int, last: int) -> Tokens:
    """``middle`` int32 [units, m], rising keys between ``first`` and ``last``, with all before and all after."""
    units = middle.shape[0]
    before = torch.arange(first, dtype=torch.int32, device=middle.device).expand(units, -1)
    after = torch.arange(last, shape.k_len, dtype=torch.int32, device=middle.device).expand(units, -1)
    tokens = torch.cat([before, middle, after], 1)
    return Tokens(shape, torch.arange(units + 1, device=middle.device) * tokens.shape[1], tokens.flatten())
