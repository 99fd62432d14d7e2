"""The C++ kernels of decode over candidates, and of LFPS's score tables."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.candidates import put_back, visible
from saccade.ops.cpu import reads
from saccade.selection import Candidates, Shape, Tokens

if TYPE_CHECKING:
    from saccade.ops.score_tables import ScoreTables

__all__ = ["attend", "candidates", "holds", "join_blocks", "learn", "probe", "reads", "sink_share", "supports"]


def supports(q: Tensor, kv: KVView, selection: Candidates | Tokens) -> bool:
    """Whether :func:`attend` can serve this call: one row, lists that each belong to one KV head."""
    return selection.shape.q_len == 1 and selection.units % kv.kv_heads == 0 and reads(q, kv)


def holds(table: Tensor) -> bool:
    """Whether the kernels can work on these tables."""
    return cpu.available() and table.device.type == "cpu"


def attend(
    q: Tensor,
    kv: KVView,
    selection: Candidates | Tokens,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
    want_weights: bool = False,
) -> tuple[Tensor, Tensor, Tokens, Tensor | None]:
    """Attention of one row over the best candidates, or over lists as they are: (out, lse, what was read, its weights
    as :func:`saccade.ops.weights.selected_weights` lays them out). ``Candidates.rest`` is left to the caller."""
    if isinstance(selection, Candidates) and selection.hidden != (0, 0):
        seen, moved = visible(kv, selection)
        out, lse, read, weights = attend(
            q, seen, moved, scale=scale, softcap=softcap, threads=threads, want_weights=want_weights
        )
        return out, lse, put_back(read, selection), weights
    shape = selection.shape
    call = cpu._Call(q, kv, shape, scale, softcap, threads)
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    offsets, indices = selection.offsets.long().contiguous(), selection.indices.int().contiguous()
    sinks = local = idle_keys = 0
    full = idle = None
    if isinstance(selection, Candidates):
        first, last = selection.forced
        sinks, local, idle_keys = first, shape.k_len - last, min(selection.idle_keys, first)
        k, full, idle = selection.k.long().contiguous(), selection.full, selection.idle
    else:
        k = torch.full((selection.units,), shape.k_len)
    lists = selection.units if idle is None else shape.heads
    ends = offsets.tolist()
    longest = shape.k_len if full is not None else max(end - start for start, end in pairwise(ends))
    longest = sinks + local + min(longest, int(k.max()))
    room = lists * longest + 1
    chosen, out_offsets = torch.empty(room, dtype=torch.int32), torch.empty(lists + 1, dtype=torch.int64)
    weights = torch.empty(shape.heads // lists, room) if want_weights else None
    cpu._kernels.gather(
        *call.geometry(0, 1),
        out.data_ptr(),
        lse.data_ptr(),
        1,
        selection.units,
        shape.k_len,
        offsets.data_ptr(),
        indices.data_ptr(),
        k.data_ptr(),
        0 if full is None else full.data_ptr(),
        0 if idle is None else idle.data_ptr(),
        sinks,
        local,
        idle_keys,
        lists,
        out_offsets.data_ptr(),
        chosen.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        room,
    )
    count = int(out_offsets[-1])
    read = selection if isinstance(selection, Tokens) else Tokens(shape, out_offsets, chosen[:count])
    return out, lse, read, None if weights is None else weights[:, :count]


def candidates(
    tables: ScoreTables,
    length: int,
    stop: int,
    a: float | None,
    gate: int,
    offsets: tuple[int, int],
    base: Tensor,
    skip: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``score_tables.candidates``."""
    out_offsets = torch.empty(tables.units + 1, dtype=torch.int64)
    # Pages that nothing is written to cost nothing; the kernel writes 16 entries at a time.
    indices = torch.empty(tables.units * length + 16, dtype=torch.int32)
    cpu._kernels.scan_tables(
        cpu._isa_index(),
        torch.get_num_threads(),
        *_addresses(tables),
        length,
        stop,
        0.0 if a is None else a,
        a is None,
        gate,
        *offsets,
        base.data_ptr(),
        0 if skip is None else skip.data_ptr(),
        out_offsets.data_ptr(),
        indices.data_ptr(),
    )
    return out_offsets, indices[: int(out_offsets[-1])]


def join_blocks(
    offsets: Tensor, indices: Tensor, blocks: Tensor, size: int, first: int, stop: int
) -> tuple[Tensor, Tensor]:
    """``candidates.join_blocks``."""
    units, count = blocks.shape
    blocks = blocks.int().contiguous()
    out_offsets = torch.empty(units + 1, dtype=torch.int64)
    joined = torch.empty(indices.numel() + units * count * size, dtype=torch.int32)
    cpu._kernels.join_blocks(
        units,
        offsets.data_ptr(),
        indices.data_ptr(),
        count,
        blocks.data_ptr(),
        size,
        first,
        stop,
        out_offsets.data_ptr(),
        joined.data_ptr(),
    )
    return out_offsets, joined[: int(out_offsets[-1])]


def learn(
    tables: ScoreTables,
    read: Tokens,
    weights: Tensor,
    idle: Tensor | None,
    decay: float,
    refresh: Tensor,
    threads: int | None,
) -> None:
    """``score_tables.learn``."""
    weights = weights if weights.stride(-1) == 1 else weights.contiguous()
    cpu._kernels.learn_tables(
        cpu._isa_index(),
        torch.get_num_threads() if threads is None else threads,
        *_addresses(tables),
        read.shape.heads,
        read.units,
        read.offsets.data_ptr(),
        read.indices.data_ptr(),
        weights.data_ptr(),
        weights.stride(0),
        0 if idle is None else idle.data_ptr(),
        refresh.data_ptr(),
        decay,
        tables.row.data_ptr(),
    )


def sink_share(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    sinks: int,
    local: int,
    mean_key: Tensor,
    spread: Tensor,
    log_count: float,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """``score_tables.sink_share``."""
    call = cpu._Call(q, kv, shape, scale, softcap, 1)
    lse = torch.empty(shape.heads, 3)
    cpu._kernels.sink_share(
        *call.geometry(0, 1), sinks, local, mean_key.data_ptr(), spread.data_ptr(), log_count, lse.data_ptr()
    )
    return lse


def probe(
    q: Tensor,
    kv: KVView,
    offsets: Tensor,
    indices: Tensor,
    at: Tensor,
    keys: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """``candidates.sampled_rest`` of ``keys`` keys, with the probes ``at`` (int32, rising)."""
    call = cpu._Call(q, kv, Shape.suffix(q.shape[0], kv.kv_heads, 1, kv.length), scale, softcap, 1)
    lse = torch.empty(q.shape[0])
    cpu._kernels.probe(
        *call.geometry(0, 1),
        offsets.numel() - 1,
        offsets.data_ptr(),
        indices.data_ptr(),
        at.numel(),
        at.data_ptr(),
        keys,
        lse.data_ptr(),
    )
    return lse


def _addresses(tables: ScoreTables) -> tuple[int, ...]:
    parts = (tables.vertical, tables.slash, tables.vertical_max, tables.slash_max, tables.sums, tables.scale)
    return (tables.units, tables.capacity, tables.first, *(part.data_ptr() for part in parts))
