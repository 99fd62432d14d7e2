"""The C++ kernels of decode over candidates and over lists of tokens."""

from __future__ import annotations

from dataclasses import replace
from operator import sub

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.call import Call, Result
from saccade.ops.candidates import put_back, visible
from saccade.ops.cpu_structs import Reads, address, native, output_of
from saccade.ops.layout import flat
from saccade.selection import Candidates, Tokens


def serves(q: Tensor, kv: KVView, selection: Candidates | Tokens) -> str | None:
    """Why :func:`attend` cannot run this call; None where it can: one row, lists that each belong to one KV head."""
    if selection.shape.q_len != 1:
        return f"it has no kernel for {type(selection).__name__} of {selection.shape.q_len} rows"
    if selection.units % kv.kv_heads:
        return f"lists of {selection.units} units do not each belong to one of {kv.kv_heads} KV heads"
    return cpu.serves(q, kv)


def attend(call: Call) -> Result:
    """One row over the best candidates, or over lists as they are. ``Candidates.rest`` is left to the caller."""
    selection, q = call.selection, call.q
    assert isinstance(selection, Candidates | Tokens)
    if isinstance(selection, Candidates) and selection.hidden != (0, 0):
        seen, moved = visible(call.kv, selection)
        ran = attend(replace(call, kv=seen, selection=moved))
        assert isinstance(ran.used, Tokens)
        return ran._replace(used=put_back(ran.used, selection))
    shape = selection.shape
    reads = Reads(q, call.kv, shape, call.scale, call.softcap, call.threads)
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    offsets, indices = selection.offsets.long().contiguous(), selection.indices.int().contiguous()
    sinks = local = idle_keys = 0
    full = idle = None
    if isinstance(selection, Candidates):
        first, last = selection.forced
        sinks, local, idle_keys = first, shape.k_len - last, min(selection.idle_keys, first)
        k = selection.k.long().contiguous()
        full = None if selection.full is None else flat(selection.full, torch.bool)
        idle = None if selection.idle is None else flat(selection.idle, torch.bool)
    else:
        k = torch.full((selection.units,), shape.k_len)
    lists = selection.units if idle is None else shape.heads
    ends = offsets.tolist()
    longest = shape.k_len if full is not None else max(map(sub, ends[1:], ends))
    longest = sinks + local + min(longest, int(k.max()))
    room = lists * longest + 1
    chosen, out_offsets = torch.empty(room, dtype=torch.int32), torch.empty(lists + 1, dtype=torch.int64)
    weights = torch.empty(shape.heads // lists, room) if call.want_weights else None
    lists_read = native.Gather(
        units=selection.units,
        keys=shape.k_len,
        offsets=offsets.data_ptr(),
        indices=indices.data_ptr(),
        k=k.data_ptr(),
        full=address(full),
        idle=address(idle),
        sinks=sinks,
        local=local,
        idle_keys=idle_keys,
        lists=lists,
        out_offsets=out_offsets.data_ptr(),
        chosen=chosen.data_ptr(),
        weights=address(weights),
        weight_stride=room,
    )
    cpu.kernels().gather(reads.threads, reads.pool, reads.table, reads.queries(), lists_read, output_of(out, lse))
    count = int(out_offsets[-1])
    read = selection if isinstance(selection, Tokens) else Tokens(shape, out_offsets, chosen[:count])
    return Result(out, lse, read, f"cpu/{cpu.isa()}", None if weights is None else weights[:, :count])
