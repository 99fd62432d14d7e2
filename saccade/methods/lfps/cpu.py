"""LFPS's rows on the C++ kernels: what csrc/listing.h is told of a layer, for rows of a step (host.py) and for a row
that chooses and learns in calls of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.lfps.choosing import Choice
from saccade.methods.lfps.stand_ins import multiples
from saccade.ops import cpu
from saccade.ops.cpu_structs import Reads, address, native
from saccade.ops.layout import flat, rows
from saccade.selection import Tokens

if TYPE_CHECKING:
    from saccade.methods.lfps.method import LFPS
    from saccade.methods.lfps.state import LFPSState
    from saccade.methods.lfps.tables import ScoreTables


def why_not(method: LFPS, q: Tensor, kv: KVView, tables: ScoreTables) -> str | None:
    """Why the kernels serve no row of ``method`` over these keys and tables; None where they do."""
    if method.reference_alone is not None:
        return method.reference_alone
    if tables.vertical.device.type != "cpu":
        return f"tables lie on {tables.vertical.device}, not on the CPU"
    return cpu.serves(q, kv)


def choose(method: LFPS, query: Query, state: LFPSState, length: int, local: int) -> Choice:
    """``choosing.choose``."""
    tables, shape, size = state.tables, query.shape, method.block_size
    full = shape.k_len // size if method.blocks else 0
    summary = query.kv.summary("stored_mean", size) if full else None
    places, probes = multiples(method.probes), method.probes_at(query)
    means = [flat(one, torch.float32) for one in (state.mean_key, state.mean_value, state.spread)]
    offsets = torch.empty(tables.units + 1, dtype=torch.int64)
    # Pages that nothing is written to cost nothing.
    indices = torch.empty(tables.units * length, dtype=torch.int32)
    idle, rest = torch.empty(shape.heads, dtype=torch.bool), torch.empty(shape.heads)
    call = Reads(query.q, query.kv, shape, query.scale, query.softcap, None)
    cpu.kernels().choose_listed(
        call.threads,
        call.pool,
        call.table,
        call.queries(),
        listed_keys(method, tables, local, method.best(length), places, probes=probes, blocks=method.blocks),
        native.ListedLayer(**layer_fields(tables, *means), summary=address(summary), summarized=full),
        native.ListedChoice(
            offsets=offsets.data_ptr(), indices=indices.data_ptr(), idle=idle.data_ptr(), rest=rest.data_ptr()
        ),
    )
    rests = bool(idle.any())
    return Choice(offsets, indices[: int(offsets[-1])], idle if rests else None, rest if rests or probes else None)


def learn(
    tables: ScoreTables, read: Tokens, weights: Tensor, idle: Tensor | None, decay: float, threads: int | None = None
) -> None:
    """``tables.learn``, where all that was read up to the row itself teaches."""
    weights, idle = rows(weights.float()), None if idle is None else flat(idle, torch.bool)
    offsets, indices = flat(read.offsets, torch.int64), flat(read.indices, torch.int32)
    refresh = flat(tables.step(), torch.bool)
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
        row=int(tables.row[0]),
    )
    cpu.kernels().learn_tables(_score_tables(tables), gain)


def listed_keys(method: LFPS, tables: ScoreTables, local: int, best: int, places: Tensor, **more: Any) -> Any:
    """A ListedKeys: a row of so many forced ``local`` keys takes the ``best`` of its candidates, with probes at the
    shares ``places``. ``more``: other fields, or others than the method's."""
    fields = {
        "units": tables.units,
        "sinks": tables.first,
        "local": local,
        "best": best,
        "tables": True,
        "a": method.a,
        "before": method.before,
        "after": method.after,
        "block_size": method.block_size,
        "places": places.data_ptr(),
        "epsilon": method.epsilon,
        "decay": method.r,
    }
    return native.ListedKeys(**fields | more)


def layer_fields(tables: ScoreTables, mean_key: Tensor, mean_value: Tensor, spread: Tensor) -> dict[str, Any]:
    """The fields of a ListedLayer, of contiguous float32 tensors."""
    return {
        "tables": _score_tables(tables),
        "mean_key": mean_key.data_ptr(),
        "mean_value": mean_value.data_ptr(),
        "spread": spread.data_ptr(),
        "steps": tables.steps,
    }


def _score_tables(tables: ScoreTables) -> Any:
    tables.check()  # all of them contiguous
    return native.ScoreTables(
        units=tables.units,
        capacity=tables.capacity,
        first=tables.first,
        vertical=tables.vertical.data_ptr(),
        slash=tables.slash.data_ptr(),
        vertical_max=tables.vertical_max.data_ptr(),
        slash_max=tables.slash_max.data_ptr(),
        sums=tables.sums.data_ptr(),
        scale=tables.scale.data_ptr(),
    )
