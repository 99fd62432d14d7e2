"""The reference backend: plain torch, float32, any selection. It is the meaning; other backends must agree with it.

For every unit and tile of rows it expands the selection to a mask, gathers the keys that any row of the tile reads, and
computes a masked softmax over them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.selection import Selection

TILE_ROWS = 128  # rows expanded at once; bounds the mask to TILE_ROWS x k_len


def attend(
    q: Tensor, kv: KVView, selection: Selection, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, q_len, head_dim] over the selected keys of ``kv``.

    Returns ``out`` [heads, q_len, head_dim] in q's dtype and ``lse`` float32 [heads, q_len], the natural log-sum-exp of
    the scaled, soft-capped logits. A row without keys gives ``(0, -inf)``. A logit that is NaN or +inf makes its row
    NaN, and the lse no finite number; one of -inf weighs nothing. Arithmetic is float32 whatever the storage (float64
    when q is float64).
    """
    shape = selection.shape
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=exact, device=q.device)
    parts = math.lcm(selection.units, shape.kv_heads)  # each part: query heads that share a unit and a KV head
    heads = shape.heads // parts
    for part in range(parts):
        rows_of = slice(part * heads, (part + 1) * heads)
        kv_head = part * shape.kv_heads // parts
        unit = part * selection.units // parts
        for start in range(0, shape.q_len, TILE_ROWS):
            stop = min(start + TILE_ROWS, shape.q_len)
            mask = selection.row_mask(unit, start, stop)
            used = mask.any(0).nonzero()[:, 0]
            k, v = kv.take(used, kv_head)
            bias = selection.row_bias(unit, start, stop)
            out[rows_of, start:stop], lse[rows_of, start:stop] = _masked(
                q[rows_of, start:stop].to(exact),
                k.to(exact),
                v.to(exact),
                mask[:, used],
                scale,
                softcap,
                None if bias is None else bias[:, used],
            )
    return out, lse


def logits(q: Tensor, k: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Scaled, soft-capped logits: ``q`` [..., r, d], ``k`` [..., m, d] -> [..., r, m]."""
    scores = q @ k.transpose(-1, -2)
    if scale != 1.0:
        scores *= scale
    return soft_capped(scores, softcap)


def soft_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), between -softcap and softcap; ``logits`` themselves where there is none."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of ``q`` [h, r, d] over ``k``, ``v`` [m, d] where ``mask`` [r, m] allows; ``bias`` [r, m] joins
    the logits."""
    if k.shape[0] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    scores = logits(q, k, scale, softcap)
    scores = (scores if bias is None else scores + bias).masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1)  # not exp(scores - lse): a float cannot hold the lse of huge logits well enough
    return weights.masked_fill_(torch.isneginf(lse).unsqueeze(-1), 0.0) @ v, lse
