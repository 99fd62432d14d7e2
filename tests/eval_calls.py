"""Attention calls made by hand, for tests of what is measured on them."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.watch.observe import AttentionCall
from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.ops.reference import attend
from saccade.selection import Dense, Selection, Shape

SCALE = 0.25


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | None = None,
    *,
    layer: int = 0,
    phase: str = "prefill",
    **spec: object,
) -> AttentionCall:
    """``q`` [heads, rows, d], the last rows of ``k``, ``v`` [kv_heads, n, d]; dense unless a selection is given."""
    shape = Shape.suffix(q.shape[0], k.shape[0], q.shape[1], k.shape[1])
    selection = Dense(shape) if selection is None else selection
    asked = LayerAttention(**{"scale": SCALE, **spec})
    view = KVView.from_tensors(k, v, shuffle_seed=1)
    out, _ = attend(q, view, selection, scale=asked.scale, softcap=asked.softcap)
    return AttentionCall(1, layer, phase, q, view, selection, asked, out)


def three_heads(n: int, distance: int = 5, strength: float = 400.0) -> tuple[Tensor, Tensor, Tensor]:
    """One KV head and three query heads over ``n`` tokens, ``q`` [3, n, n + 1]: head 0 puts all mass on token 0, head 1
    on the token ``distance`` before its own (on token 0 where there is none), head 2 the same on every token."""
    q, k = torch.zeros(3, n, n + 1), torch.zeros(1, n, n + 1)
    k[0, range(n), range(n)] = 1.0
    k[0, 0, n] = 1.0
    q[0, :, n] = strength
    rows = torch.arange(n)
    q[1, rows, (rows - distance).clamp(min=0)] = strength
    generator = torch.Generator().manual_seed(n)
    return q, k, torch.randn(1, n, n + 1, generator=generator)
