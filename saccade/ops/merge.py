"""The one way partial attention meets: log-sum-exp merge over disjoint key sets."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint key sets.

    ``out_*`` [..., head_dim] and ``lse_*`` [...] are what :func:`saccade.ops.attend` returned for each set; an empty
    set is ``(0, -inf)``. Returns ``(out, lse)`` over the union, ``out`` in ``out_a``'s dtype, computed in float32
    (float64 if given).

    >>> out, lse = merge_state(*attend(q, left), *attend(q, right))  # doctest: +SKIP
    """
    lse = torch.logaddexp(lse_a, lse_b)
    anchor = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)  # both empty: weights 0, not NaN
    weight_a = torch.exp(lse_a - anchor).unsqueeze(-1)
    weight_b = torch.exp(lse_b - anchor).unsqueeze(-1)
    out = weight_a * out_a.to(weight_a.dtype) + weight_b * out_b.to(weight_b.dtype)
    return out.to(out_a.dtype), lse
