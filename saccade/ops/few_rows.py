"""Dense attention of a few last rows of one sequence, reading its keys once for all of them.

All rows see the keys before the first one's own, so over those they are one row of more query heads: the kernels of
decode, which split long contexts among threads, read each key once for all heads of a KV head. The few keys behind are
a small causal product of their own, and the two meet by their log-sum-exp (as prefix and suffix do in Hydragen,
arXiv:2402.05099).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.ops.attend import run as run_call
from saccade.ops.call import Call, Result
from saccade.ops.merge import merge_state
from saccade.selection import Dense, Shape

LEAST_KEYS = 512  # before the first row: with fewer, one call is as fast
MOST_HEADS = 64  # query heads of a KV head, times rows, that decode kernels take at once


def run(call: Call, backend: str = "auto") -> Result:
    """``ops.run`` of a call, in two parts where it is Dense and has 2 or more rows at the end of many keys. The same
    result but for rounding."""
    shape = call.selection.shape
    rows, before = shape.q_len, shape.q_start
    fits = shape.group * rows <= MOST_HEADS and before + rows == shape.k_len
    if type(call.selection) is not Dense or rows < 2 or before < LEAST_KEYS or not fits or call.q.is_cuda:
        return run_call(call, backend)
    wide = Shape.suffix(shape.heads * rows, shape.kv_heads, 1, before, shape.device)
    q = call.q.reshape(shape.heads * rows, 1, -1)
    common = run_call(replace(call, q=q, kv=call.kv.upto(before), selection=Dense(wide)), backend)
    own, own_lse = _among(call, before)
    out, lse = merge_state(common.out.view(shape.heads, rows, -1), common.lse.view(shape.heads, rows), own, own_lse)
    return Result(out, lse, call.selection, common.backend)


def _among(call: Call, before: int) -> tuple[Tensor, Tensor]:
    """Attention of the rows over the keys behind the first ``before``: out fp32 [heads, rows, head_dim], and lse."""
    shape = call.selection.shape
    keys, values = (part(before, shape.k_len).float() for part in (call.kv.keys, call.kv.values))
    q = call.q.float().reshape(shape.kv_heads, -1, call.q.shape[-1])
    logits = (q @ keys.transpose(1, 2)).view(shape.heads, shape.q_len, -1) * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    later = torch.ones(shape.q_len, shape.q_len, dtype=torch.bool, device=q.device).triu(1)
    logits = logits.masked_fill(later, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse[..., None]).view(shape.kv_heads, -1, shape.q_len)
    return (weights @ values).view(shape.heads, shape.q_len, -1), lse
