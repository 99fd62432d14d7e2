"""Block summaries: what a method may know of a block without reading it.

``cuboid`` is ArkVale's cuboid-mean, PSA's metadata: with c = (max + min) / 2 and u = mean_i |c - k_i| per channel,
parts (hi, lo) = (c + u, c - u). ``minmax`` is Quest's (max, min), a true bound of every dot product. ``mean`` is the
mean key, ``stored_mean`` the same in the keys' dtype; ``moments`` are the mean and the variance of every channel.
``mean_value`` is the mean of the block's values. ``low_rank`` is LOCKS's record of bytes (kv.low_rank).

The others but ``mean`` and ``mean_value`` are kept in the keys' own dtype: every decode step reads them all, so half
the bytes is half the time. Extremes lose nothing by it; the others are rounded, as in ArkVale's code, which keeps its
digests in the model's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.low_rank import packed, record_rows

if TYPE_CHECKING:
    from saccade.kv.view import KVView

PARTS = {"cuboid": 2, "minmax": 2, "mean": 1, "stored_mean": 1, "moments": 2, "mean_value": 1}
KINDS = (*PARTS, "low_rank")
FLOAT = ("mean", "mean_value")  # kept in fp32
TILE_KEYS = 2048  # keys summarized at once: what is made of them stays in a cache


def parts_of(kind: str, block_size: int, head_dim: int) -> int:
    """Rows of a block's summary."""
    return record_rows(block_size, head_dim) if kind == "low_rank" else PARTS[kind]


def kept_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """What summaries of keys of ``dtype`` are kept in."""
    if kind == "low_rank":
        return torch.uint8
    return torch.float32 if kind in FLOAT else dtype


def summarize(keys: Tensor, kind: str) -> Tensor:
    """Summarize ``keys`` (for ``mean_value``: values) [..., block, head_dim] over the block axis: fp32 [parts, ...,
    head_dim], ``low_rank`` uint8."""
    keys = keys.float()
    if kind == "low_rank":
        return packed(keys)
    if kind in ("mean", "stored_mean", "mean_value"):
        return keys.mean(-2)[None]
    if kind == "moments":
        mean = keys.mean(-2)
        return torch.stack([mean, (keys - mean.unsqueeze(-2)).square().mean(-2)])
    low, high = keys.amin(-2), keys.amax(-2)
    if kind == "minmax":
        return torch.stack([high, low])
    if kind == "cuboid":
        center = (high + low) / 2
        spread = (center.unsqueeze(-2) - keys).abs_().mean(-2)
        return torch.stack([center + spread, center - spread])
    raise SaccadeError(f"unknown block summary {kind!r}; known: {', '.join(KINDS)}")


def summarize_view(view: KVView, kind: str, block_size: int, first: int, last: int) -> Tensor:
    """Summaries of full blocks ``first .. last - 1`` of a view: [last - first, parts, kv_heads, head_dim], in
    :func:`kept_dtype`."""
    if (made := view.summarized(kind, block_size, first, last)) is not None:
        return made
    rows = view.values if kind == "mean_value" else view.keys
    step = max(1, TILE_KEYS // block_size)
    tiles = []
    for start in range(first, max(last, first + 1), step):
        stop = min(start + step, last)
        keys = rows(start * block_size, stop * block_size)  # [G, m * block, d]
        made = view.mover.summarize_rows(keys, kind, block_size)
        if made is not None:
            tiles.append(made)
            continue
        parts = summarize(keys.unflatten(1, (stop - start, block_size)), kind)  # [parts, G, m, d]
        tiles.append(parts.permute(2, 0, 1, 3).to(kept_dtype(kind, view.dtype)))
    return torch.cat(tiles).contiguous()
