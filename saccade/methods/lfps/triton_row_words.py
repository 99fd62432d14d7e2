"""How the kernels of LFPS's recorded steps find what a row's state holds: its words (recorded.py fills them in)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from saccade.methods.triton_topk import budget_of
from saccade.ops.triton.batched_rows import LayerRows
from saccade.ops.triton.common import launched, pad

# Words of a row. Numbers: 0 sinks, 1 keys forced at the end, 2 k (0: a share), 3 least, 4 before, 5 after, 6 blocks,
# 7 probes, 8 bypass (0 sink, 1 sink_mean, 2 mean), 9 flags (1 slash_shift_on_read, 2 bypass_shift, 4 read_local),
# 10 gate (its place in tables.GATES), 11 running_means, 12 the tables' capacity, 13 room for what a step learns,
# 26 local. Addresses: 14 vertical and 15 slash float32 [units, capacity], 16 sums float64 [units, 2, 4], 17 scale
# float64 [units], 18 row (unused), 19 mean key and 20 mean value float32 [kv_heads, head_dim], 21 spread float32
# [heads], 22 keys int32 and 23 gains float32 [units, room] that are pending, 24 marks, 25 int64 [kv_heads] keys in the
# means. Marks int64 [units, 4]: the length that what is pending belongs to; the length learnt up to; how many keys are
# pending, -1 where the unit learns nothing; whether its slash table is to stay where it is.
# Reals: 0 k as a share, 1 decay, 2 a (negative: every entry is a candidate), 3 epsilon.


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
    whole = tl.minimum(tl.load(own + 2), 1 << 30).to(tl.int32)
    budget = budget_of(whole, tl.load(reals), n)
    budget = tl.where(whole > 0, budget, tl.maximum(budget, tl.minimum(tl.load(own + 3), 1 << 30).to(tl.int32)))
    reads_local = (tl.load(own + 9) & 4) != 0
    local = tl.minimum(tl.load(own + 1).to(tl.int32), n)
    dense = n - tl.where(reads_local, 0, 1) <= budget
    return n, dense, tl.where(reads_local, tl.maximum(budget - local, 0), budget), local


@triton.jit
def pointer(own, WORD: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(own + WORD).to(tl.pointer_type(TYPE))
