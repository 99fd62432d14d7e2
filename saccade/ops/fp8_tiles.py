"""Queries and keys as antidiagonal sums in FP8 see them: tiles of ``stride`` rows side by side in e4m3 (``ops.fp8``), a
scale for each tile, which is constant along a sum.

Of keys their centre is taken off first, as SageAttention does (arXiv:2410.02367): channels that are large and alike in
all keys would lose what differs. That moves all logits of a row alike, which a softmax does not see, unless a cap bends
logits: then nothing is taken off. (In a tile that the context's end cuts, whose antidiagonal has fewer of the rows than
its neighbours', the offset itself would count.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.fp8 import quantize
from saccade.selection import Shape

SAMPLES = 1024  # keys that the centre is the mean of


def centre(kv: KVView, k_len: int) -> Tensor:
    """Mean of up to SAMPLES of the first ``k_len`` keys, evenly spaced: fp32 [kv_heads, head_dim]; 0 where it is not
    finite."""
    count = min(SAMPLES, k_len)
    places = torch.arange(count, device=kv.device) * k_len // count
    means = torch.stack([kv.head_keys(head, k_len)[places].float().mean(0) for head in range(kv.kv_heads)])
    return torch.where(means.isfinite(), means, 0.0)


def rounded(q: Tensor, kv: KVView, shape: Shape, stride: int, softcap: float | None = None) -> tuple[Tensor, KVView]:
    """``q`` [heads, q_len, head_dim] and the keys of ``kv``, less their centre, as e4m3 leaves them, in fp32. (The
    view's values are its keys.)"""
    keys = torch.stack([kv.head_keys(head, shape.k_len).float() for head in range(shape.kv_heads)])
    if softcap is None:
        keys -= centre(kv, shape.k_len)[:, None]
    keys = _rounded(keys, 0, stride)
    return _rounded(q.float(), shape.q_start % stride, stride), KVView.from_tensors(keys, keys)


def _rounded(x: Tensor, ahead: int, stride: int) -> Tensor:
    """``x`` fp32 [heads, n, head_dim], rounded in tiles that lie ``ahead`` rows before its first one."""
    heads, n, head_dim = x.shape
    padded = torch.nn.functional.pad(x, (0, 0, ahead, -(ahead + n) % stride))
    rows = quantize(padded.reshape(-1, stride * head_dim)).dequantized()
    return rows.view(heads, -1, head_dim)[:, ahead : ahead + n]
