"""Dense attention of a few last rows of one sequence, reading its keys once for all of them.

On a CPU a chunk of few rows makes few tasks, one for each KV head. Here its keys are cut into parts, as decode kernels
cut them (flash decoding), each a task of its own, and the parts meet by their log-sum-exp.

* With tile products (AMX) the rows of a KV head's query heads are the lanes of one task. A part is a list of blocks
  that stand-ins of the query heads read: the kernels of prefill give each list a task.
* Else all rows see the keys before the first one's own, so over those they are one row of more query heads, which the
  kernels of decode serve; the few keys behind are a small causal product (prefix and suffix as in Hydragen,
  arXiv:2402.05099).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from saccade.ops import cpu
from saccade.ops.attend import run as run_call
from saccade.ops.call import Call, Result
from saccade.ops.merge import merge_state
from saccade.selection import Blocks, Dense, Shape

LEAST_KEYS = 512  # before the first row: with fewer, one call is as fast
MOST_HEADS = 64  # query heads of a KV head, times rows, that decode kernels take at once
BLOCK = 128  # keys of a block of a part
TASKS = 2  # parts a thread, all KV heads together


def run(call: Call, backend: str = "auto") -> Result:
    """``ops.run`` of a call, in parts where it is Dense and has 2 or more rows at the end of many keys on a CPU. The
    same result but for rounding."""
    shape = call.selection.shape
    rows, before = shape.q_len, shape.q_start
    fits = before >= LEAST_KEYS and before + rows == shape.k_len
    if type(call.selection) is not Dense or rows < 2 or not fits or not call.q.is_cpu:
        return run_call(call, backend)
    if call.q.dtype is torch.bfloat16 and cpu.isa() == "amx_bf16" and rows > 2:
        return _in_parts(call, backend)
    if shape.group * rows > MOST_HEADS:
        return run_call(call, backend)
    wide = Shape.suffix(shape.heads * rows, shape.kv_heads, 1, before, call.q.device)
    q = call.q.reshape(shape.heads * rows, 1, -1)
    common = run_call(replace(call, q=q, kv=call.kv.upto(before), selection=Dense(wide)), backend)
    own, own_lse = _among(call, before)
    out, lse = merge_state(common.out.view(shape.heads, rows, -1), common.lse.view(shape.heads, rows), own, own_lse)
    return Result(out, lse, call.selection, common.backend)


def _in_parts(call: Call, backend: str) -> Result:
    shape = call.selection.shape
    threads = call.threads or torch.get_num_threads()
    blocks = -(-shape.k_len // BLOCK)
    parts = max(1, min(blocks // 4, -(-TASKS * threads // shape.kv_heads)))
    if parts == 1:
        return run_call(call, backend)
    heads = (shape.kv_heads, parts, shape.group, shape.q_len)
    q = call.q.unflatten(0, (shape.kv_heads, 1, shape.group)).expand(*heads, call.q.shape[-1]).flatten(0, 2)
    wide = Shape.suffix(shape.heads * parts, shape.kv_heads, shape.q_len, shape.k_len, call.q.device)
    offsets, indices = _lists(shape.q_start // BLOCK, blocks, shape.kv_heads, parts)
    ran = run_call(replace(call, q=q, selection=Blocks(wide, BLOCK, offsets, indices)), backend)
    lse = ran.lse.view(heads)
    whole = torch.logsumexp(lse, 1)
    shares = torch.exp(lse - whole[:, None])
    out = (shares[..., None] * ran.out.view(*heads, -1).float()).sum(1)
    return Result(out.view(call.q.shape).to(call.q.dtype), whole.view(shape.heads, -1), call.selection, ran.backend)


@lru_cache(maxsize=64)
def _lists(first: int, blocks: int, kv_heads: int, parts: int) -> tuple[Tensor, Tensor]:
    """Offsets int64 and indices int32 of the lists of ``kv_heads * parts`` units: each part's share of the blocks, for
    every query block from number ``first`` on those up to its own."""
    ends = [blocks * part // parts for part in range(parts + 1)]
    lists = [
        torch.arange(ends[part], min(ends[part + 1], query_block + 1), dtype=torch.int32, device="cpu")
        for part in range(parts)
        for query_block in range(first, blocks)
    ] * kv_heads
    offsets = torch.tensor([0, *(one.numel() for one in lists)], device="cpu").cumsum(0)
    return offsets, torch.cat(lists)


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
