"""The C++ kernels of LFPS: scans and updates of its score tables, and what stands for keys that are not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.cpu import serves as serves_keys
from saccade.ops.cpu_structs import Call, address, native
from saccade.ops.layout import flat, rows
from saccade.selection import Shape, Tokens

if TYPE_CHECKING:
    from saccade.methods.lfps.tables import ScoreTables

__all__ = ["candidates", "join_blocks", "learn", "probe", "serves", "serves_keys", "sink_share", "table_fields"]


def serves(table: Tensor) -> str | None:
    """Why the kernels cannot work on these tables or lists; None where they can."""
    if not cpu.available():
        return cpu.why_unavailable()
    return None if table.device.type == "cpu" else f"tables lie on {table.device}, not on the CPU"


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
    """``tables.candidates``."""
    base, skip = flat(base, torch.int64), None if skip is None else flat(skip, torch.bool)
    out_offsets = torch.empty(tables.units + 1, dtype=torch.int64)
    # Pages that nothing is written to cost nothing; the kernel writes 16 entries at a time.
    indices = torch.empty(tables.units * length + 16, dtype=torch.int32)
    before, after = offsets
    scan = native.TableScan(
        threads=torch.get_num_threads(),
        length=length,
        stop=stop,
        a=0.0 if a is None else a,
        unbounded=a is None,
        gate=gate,
        before=before,
        after=after,
        base=base.data_ptr(),
        skip=address(skip),
        offsets=out_offsets.data_ptr(),
        indices=indices.data_ptr(),
    )
    cpu.kernels().scan_tables(_tables(tables), scan)
    return out_offsets, indices[: int(out_offsets[-1])]


def join_blocks(
    offsets: Tensor, indices: Tensor, blocks: Tensor, size: int, first: int, stop: int
) -> tuple[Tensor, Tensor]:
    """``tables.join_blocks``."""
    units, count = blocks.shape
    offsets, indices, blocks = flat(offsets, torch.int64), flat(indices, torch.int32), flat(blocks, torch.int32)
    out_offsets = torch.empty(units + 1, dtype=torch.int64)
    joined = torch.empty(indices.numel() + units * count * size, dtype=torch.int32)
    native.join_blocks(
        native.JoinBlocks(
            units=units,
            offsets=offsets.data_ptr(),
            indices=indices.data_ptr(),
            count=count,
            blocks=blocks.data_ptr(),
            size=size,
            first=first,
            stop=stop,
            out_offsets=out_offsets.data_ptr(),
            out=joined.data_ptr(),
        )
    )
    return out_offsets, joined[: int(out_offsets[-1])]


def learn(
    tables: ScoreTables,
    read: Tokens,
    weights: Tensor,
    idle: Tensor | None,
    decay: float,
    stop: int,
    refresh: Tensor,
    threads: int | None,
) -> None:
    """``tables.learn``."""
    weights, idle = rows(weights), None if idle is None else flat(idle, torch.bool)
    offsets, indices = flat(read.offsets, torch.int64), flat(read.indices, torch.int32)
    refresh = flat(refresh, torch.bool)
    gain = native.TableGain(
        threads=torch.get_num_threads() if threads is None else threads,
        heads=read.shape.heads,
        lists=read.units,
        offsets=offsets.data_ptr(),
        indices=indices.data_ptr(),
        weights=weights.data_ptr(),
        weight_stride=weights.stride(0),
        idle=address(idle),
        refresh=refresh.data_ptr(),
        decay=decay,
        stop=stop,
        row=tables.row.data_ptr(),
    )
    cpu.kernels().learn_tables(_tables(tables), gain)


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
    """``stand_ins.sink_share``."""
    call = Call(q, kv, shape, scale, softcap, 1)
    mean_key, spread = flat(mean_key, torch.float32), flat(spread, torch.float32)
    lse = torch.empty(shape.heads, 3)
    share = native.SinkShare(
        sinks=sinks,
        local=local,
        mean_key=mean_key.data_ptr(),
        spread=spread.data_ptr(),
        log_count=log_count,
        lse=lse.data_ptr(),
    )
    cpu.kernels().sink_share(call.pool, call.table, call.queries(), share)
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
    """``stand_ins.sampled_rest`` of ``keys`` keys, with the probes ``at`` (int32, rising)."""
    call = Call(q, kv, Shape.suffix(q.shape[0], kv.kv_heads, 1, kv.length), scale, softcap, 1)
    offsets, indices, at = flat(offsets, torch.int64), flat(indices, torch.int32), flat(at, torch.int32)
    lse = torch.empty(q.shape[0])
    probes = native.Probes(
        units=offsets.numel() - 1,
        count=at.numel(),
        offsets=offsets.data_ptr(),
        indices=indices.data_ptr(),
        at=at.data_ptr(),
        keys=keys,
        lse=lse.data_ptr(),
    )
    cpu.kernels().probe(call.pool, call.table, call.queries(), probes)
    return lse


def _tables(tables: ScoreTables) -> Any:
    return native.ScoreTables(**table_fields(tables))


def table_fields(tables: ScoreTables) -> dict[str, int]:
    """The fields of a ScoreTables struct."""
    tables.check()  # all of them contiguous
    return {
        "units": tables.units,
        "capacity": tables.capacity,
        "first": tables.first,
        "vertical": tables.vertical.data_ptr(),
        "slash": tables.slash.data_ptr(),
        "vertical_max": tables.vertical_max.data_ptr(),
        "slash_max": tables.slash_max.data_ptr(),
        "sums": tables.sums.data_ptr(),
        "scale": tables.scale.data_ptr(),
    }
