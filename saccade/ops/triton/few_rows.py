"""Dense attention of a few last rows of several sequences, which reads the keys of each once for all its rows: the
counterpart of ``ops.few_rows`` on a GPU.

Over the keys before its first one's own the rows of a sequence are one row of more query heads, so one launch of split
decode serves all sequences. The few keys behind are the new rows' own: a small causal product of plain tensors. The two
meet by their log-sum-exp (prefix and suffix as in Hydragen, arXiv:2402.05099)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.merge import merge_state
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.dispatch import pages_of

FEW_HEADS = 32  # rows of a tile of queries that fit the registers of kernels for single rows


def attend_few(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    views: Sequence[KVView],
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, n * rows, head_dim], the last rows of n sequences of one pool one after the other; ``k``, ``v``
    [kv_heads, n * rows, head_dim] their own keys and values, which ``views`` hold at their ends. Each has a key
    before them. Returns ``out`` like q and ``lse`` float32 [heads, n * rows]."""
    heads, packed, head_dim = q.shape
    count, kv_heads = len(views), k.shape[0]
    rows, group = packed // count, heads // kv_heads
    own = q.unflatten(1, (count, rows)).transpose(0, 1)  # [n, heads, rows, head_dim]
    pages = pages_of([view.upto(view.length - rows) for view in views])
    small = group * rows <= FEW_HEADS
    out, lse = attend_decode(
        own.reshape(count, heads * rows, head_dim),
        pages,
        None,
        scale=scale,
        softcap=softcap,
        warps=4 if small else 8,
        registers=96 if small else None,
    )
    wide = own.reshape(count, kv_heads, group * rows, head_dim).float()
    keys, values = (part.unflatten(1, (count, rows)).transpose(0, 1).float() for part in (k, v))
    logits = (wide @ keys.transpose(2, 3)).view(count, heads, rows, rows) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    logits = logits.masked_fill(later, -torch.inf)
    near = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - near[..., None]).view(count, kv_heads, group * rows, rows)
    near_out = (weights @ values).view(count, heads, rows, head_dim)
    joined, whole = merge_state(out.view(count, heads, rows, head_dim), lse.view(count, heads, rows), near_out, near)
    return joined.transpose(0, 1).reshape(q.shape), whole.transpose(0, 1).reshape(heads, packed)
