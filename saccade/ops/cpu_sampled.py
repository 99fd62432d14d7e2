"""The C++ kernel of attention over sampled keys, whose logits gain a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.call import Call, Result
from saccade.ops.cpu_structs import Reads, native, output_of
from saccade.selection import Sampled


def serves(q: Tensor, kv: KVView, selection: Sampled) -> str | None:
    """Why :func:`attend` cannot run this call; None where it can: one row, a list for each query head."""
    shape = selection.shape
    if shape.q_len != 1 or selection.units != shape.heads:
        return f"it reads samples of one row, a list a query head; got {shape.q_len} rows, {selection.units} lists"
    return cpu.serves(q, kv)


def attend(call: Call) -> Result:
    """One row over lists of keys whose logits gain a bias."""
    q, selection = call.q, call.selection
    assert isinstance(selection, Sampled)
    reads = Reads(q, call.kv, selection.shape, call.scale, call.softcap, call.threads)
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    offsets, indices = selection.tokens.offsets.long().contiguous(), selection.tokens.indices.int().contiguous()
    bias, sums = selection.bias.float().contiguous(), torch.empty(q.shape, dtype=torch.float32)
    lists = native.Sampled(
        offsets=offsets.data_ptr(), indices=indices.data_ptr(), bias=bias.data_ptr(), sums=sums.data_ptr()
    )
    cpu.kernels().sampled(reads.threads, reads.pool, reads.table, reads.queries(), lists, output_of(out, lse))
    return Result(out, lse, selection, f"cpu/{cpu.isa()}")
