"""The C++ CPU kernels: attention over any prefill selection but token lists, on a paged KV view. What selections are
decided from is in cpu_sums.py.

The build holds one kernel set per instruction set and the best one this CPU runs is used. ``SACCADE_ISA`` in the
environment, or :func:`set_isa`, picks another: ``amx_bf16``, ``avx512_bf16``, ``avx2``, ``neon_bf16``,
``neon`` or ``portable``.

Rounding differs between the sets (and from the reference), but within one set a result depends only on the call: not on
the number of threads, nor on what else runs.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.paged import Paged
from saccade.kv.view import KVView
from saccade.ops.call import Call, Result
from saccade.ops.cpu_structs import STORAGE, Reads, keys_of, missing, native
from saccade.ops.reference import soft_capped
from saccade.selection import Band, Blocks, Dense, Lines, Mixed, Selection, Tri, Windowed

MAX_HEAD_DIM = 1024
_NAMES = ("amx_bf16", "avx512_bf16", "avx2", "neon_bf16", "neon", "portable")
_sets: list[Any] = native.kernel_sets() if native is not None else []
_chosen: Any = None


def available() -> bool:
    """Whether the C++ kernels can be used here."""
    return native is not None


def why_unavailable() -> str:
    """One sentence naming what is lost, or an empty string when the kernels are there."""
    if available():
        return ""
    return (
        f"the C++ CPU kernels are not installed ({missing}); the reference torch backend runs instead, several times "
        "slower. Install a C++17 compiler and reinstall saccade to get them"
    )


def supported_isas() -> list[str]:
    """Instruction sets this build holds and this CPU runs, best first."""
    return [kernel_set.name for kernel_set in _sets]


def isa() -> str:
    """The instruction set in use; an empty string without kernels."""
    return str(kernels().name) if available() else ""


def set_isa(name: str | None) -> None:
    """Use the kernels of one instruction set from now on; None goes back to ``SACCADE_ISA`` or the best one."""
    global _chosen
    _chosen = None if name is None else _set_of(name, "instruction set")


def _set_of(name: str, what: str) -> Any:
    known = supported_isas()
    if name not in known:
        why = "is not supported here" if name in _NAMES else "is unknown"
        raise SaccadeError(f"{what} {name!r} {why}; this CPU and build support: {', '.join(known) or 'none'}")
    return _sets[known.index(name)]


def kernels() -> Any:
    """The kernel set in use: its methods are the kernels."""
    global _chosen
    if _chosen is None:
        wanted = os.environ.get("SACCADE_ISA", "")
        _chosen = _set_of(wanted, "SACCADE_ISA:") if wanted else _sets[0]
    return _chosen


def serves(q: Tensor, kv: KVView, selection: Selection | None = None) -> str | None:
    """Why the kernels cannot read these tensors, or :func:`attend` not run ``selection`` over them; None where they
    can.

    They read tensors on the CPU, of one dtype (float32 or bfloat16), with a head_dim that is a multiple of 16, and
    Dense, Band, Blocks, Lines and Tri selections, what a window leaves of them, and one of them for each head.
    """
    if isinstance(selection, Mixed):
        return next((why for part in selection.parts if (why := serves(q, kv, part)) is not None), None)
    if selection is not None:
        inner = selection.inner if isinstance(selection, Windowed) else selection
        if type(inner) not in (Dense, Band, Blocks, Lines, Tri):
            return f"it has no kernel for {type(inner).__name__} of {inner.shape.q_len} rows"
        if why := uneven(inner.units, kv.kv_heads):
            return why
    paged = kv.layout()
    keys, layout = paged.k, paged.format
    if (
        native is not None
        and not kv.in_pieces
        and q.dtype in STORAGE
        and q.dtype == layout.dtype
        and q.device.type == keys.device.type == "cpu"
        and q.shape[-1] == layout.head_dim
        and layout.head_dim % 16 == 0
        and layout.head_dim <= MAX_HEAD_DIM
        and layout.block_size % 16 == 0
    ):
        return None
    return "its keys do not fit the memory at once" if kv.in_pieces else _unread(q, paged)


def uneven(units: int, kv_heads: int) -> str | None:
    """Why lists of ``units`` units cannot be read: some would straddle KV heads. None where neither number cuts across
    the other."""
    few, many = (units, kv_heads) if units < kv_heads else (kv_heads, units)
    return None if many % few == 0 else f"lists of {units} units cut across {kv_heads} KV heads"


def _unread(q: Tensor, paged: Paged) -> str:
    """What of these tensors no kernel reads."""
    keys, layout = paged.k, paged.format
    if native is None:
        return why_unavailable()
    if q.device.type != "cpu" or keys.device.type != "cpu":
        return f"q lies on {q.device} and the keys on {keys.device}, its kernels run on the CPU"
    if q.dtype not in STORAGE or q.dtype != layout.dtype:
        return f"its kernels read float32 or bfloat16, queries and keys alike; got {q.dtype} and {layout.dtype}"
    if q.shape[-1] != layout.head_dim or layout.head_dim % 16 or layout.head_dim > MAX_HEAD_DIM:
        return (
            f"its kernels read a head_dim that is a multiple of 16 up to {MAX_HEAD_DIM}; got {q.shape[-1]} and "
            f"{layout.head_dim}"
        )
    return f"its kernels read blocks of a multiple of 16 tokens; got {layout.block_size}"


def attend(call: Call) -> Result:
    """``call``, which :func:`serves`: a row without keys gives ``(0, -inf)``. ``call.threads`` defaults to
    ``torch.get_num_threads()``."""
    if native is None:
        raise SaccadeError(why_unavailable())
    q, selection = call.q, call.selection
    reads = Reads(q, call.kv, selection.shape, call.scale, call.softcap, call.threads)
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2], dtype=torch.float32)
    parts: list[tuple[Selection, Tensor | None]] = [(selection, None)]  # each with its query heads, uint8 [heads]
    if isinstance(selection, Mixed):
        heads = [selection.choice == index for index in range(len(selection.parts))]
        parts = [(part, own.to(torch.uint8)) for part, own in zip(selection.parts, heads) if bool(own.any())]
    for part, active in parts:
        masks = {} if active is None else {"active": active.data_ptr()}
        inner, starts = (part.inner, part.starts.int()) if isinstance(part, Windowed) else (part, None)
        for piece, start, stop in _pieces(inner):
            if isinstance(part, Windowed) and starts is not None:  # keys below the sinks' and from starts on
                masks.update(starts=starts[start:].data_ptr(), sink_keys=part.cone.sink_keys)
            keys, _lists = keys_of(piece, **masks)
            written = native.Output(out=out[:, start:].data_ptr(), lse=lse[:, start:].data_ptr(), rows=out.shape[1])
            kernels().attend(reads.threads, reads.pool, reads.table, reads.queries(start, stop), keys, written)
        if isinstance(part, Windowed):
            _attend_own(reads, part, out, lse, active)
    return Result(out, lse, selection, f"cpu/{isa()}")


def attend_few(
    q: Tensor,
    kv: KVView,
    selection: Dense | Band,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attend` of a few rows over all keys or a band, which are read once for all rows, in parts that share out
    among all threads."""
    shape = selection.shape
    call = Reads(q, kv, shape, scale, softcap, threads)
    keys, _ = keys_of(selection)
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    written = native.Output(out=out.data_ptr(), lse=lse.data_ptr(), rows=out.shape[1])
    kernels().attend_few(call.threads, call.pool, call.table, call.queries(0, shape.q_len), keys, written)
    return out, lse


def _pieces(selection: Selection) -> list[tuple[Selection, int, int]]:
    """What one call each reads: rows ``start .. stop - 1``, at least one."""
    rows = selection.shape.q_len
    pieces: list[tuple[Selection, int, int]] = [(selection, 0, rows)]
    if isinstance(selection, Tri):
        banded = min(selection.band_rows, rows)
        pieces = [(selection.band, 0, banded), (Dense(selection.shape), banded, rows)]
    return [piece for piece in pieces if piece[1] < piece[2]]


def _attend_own(call: Reads, selection: Windowed, out: Tensor, lse: Tensor, active: Tensor | None) -> None:
    """What rows read that a window would leave without keys: their own one, with weight 1."""
    heads, group = selection.shape.heads // selection.units, selection.shape.group
    for unit in range(selection.units):
        rows = selection.emptied(unit)
        for head in range(unit * heads, (unit + 1) * heads) if rows.numel() else ():
            if active is not None and not active[head]:
                continue
            k, v = call.kv.take(selection.shape.rows[rows], head // group)
            logit = (call.q[head, rows].float() * k.float()).sum(-1) * call.scale
            lse[head, rows] = soft_capped(logit, call.softcap)
            out[head, rows] = v.to(out.dtype)


def read_pass(data: Tensor, threads: int) -> None:
    """Read a contiguous tensor once, in order, each thread its share: what a bandwidth measurement repeats."""
    kernels().read_pass(threads=threads, data=data.data_ptr(), bytes=data.numel() * data.element_size())


def gather_pass(data: Tensor, rows: Tensor, row_bytes: int, threads: int) -> None:
    """Read rows of ``row_bytes`` (a multiple of 64) of a contiguous tensor in the order of ``rows`` int32."""
    kernels().gather_pass(
        threads=threads, data=data.data_ptr(), rows=rows.data_ptr(), count=rows.numel(), row_bytes=row_bytes
    )
