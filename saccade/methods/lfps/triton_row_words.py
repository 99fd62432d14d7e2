"""How the kernels of LFPS's recorded steps find what a row's state holds (recorded.py)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.lfps.recorded import Marks, Reals, Words
from saccade.methods.triton_topk import budget_of
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import launched, pad
from saccade.ops.triton.state_words import places

W, R, M = places(Words), places(Reals), places(Marks)
MARKS: tl.constexpr = tl.constexpr(len(Marks._fields))


def static(rows: LayerRows, **more: object) -> dict[str, object]:
    """What all kernels of rows take when they are compiled."""
    return {
        "HEADS": rows.heads, "KV_HEADS": rows.kv_heads, "D": rows.q.shape[2], "D_PAD": pad(rows.q.shape[2]),
        "PAGE": rows.pages.k.shape[2], **more, **launched(rows.q.device),
    }  # fmt: skip


def query_of(rows: LayerRows) -> Tensor:
    return rows.q if rows.q.stride(-1) == 1 else rows.q.contiguous()


@triton.jit
def budget_at(own, reals, length, first):
    """Keys that are no sinks, whether all are read, how many candidates are, and how many last keys are forced."""
    n = length - first
    whole = tl.minimum(tl.load(own + W.k), 1 << 30).to(tl.int32)
    budget = budget_of(whole, tl.load(reals + R.share), n)
    budget = tl.where(whole > 0, budget, tl.maximum(budget, tl.minimum(tl.load(own + W.least), 1 << 30).to(tl.int32)))
    local = tl.minimum(tl.load(own + W.local).to(tl.int32), n)
    return n, n <= budget, tl.maximum(budget - local, 0), local


@triton.jit
def pointer(own, WORD: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(own + WORD).to(tl.pointer_type(TYPE))
