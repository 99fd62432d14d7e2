"""The C++ CPU kernels: attention over any prefill selection but token lists, on a paged KV view. What selections are
decided from is in cpu_sums.py and cpu_decode.py.

``saccade._kernels`` holds one kernel set per instruction set and the best one this CPU runs is used. ``SACCADE_ISA`` in
the environment, or :func:`set_isa`, picks another: ``avx512_bf16``, ``avx2`` or ``portable``.

Rounding differs between the sets (and from the reference), but within one set a result depends only on the call: not on
the number of threads, nor on what else runs.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.selection import Band, Blocks, Dense, Lines, Mixed, Selection, Shape, Tri, Windowed

_kernels: Any = None
_missing = ""
try:
    _kernels = importlib.import_module("saccade._kernels")
except ImportError as error:  # installed without a compiler, or built for another Python
    _missing = str(error)

_STORAGE = {torch.float32: 0, torch.bfloat16: 1}
_MAX_HEAD_DIM = 1024
_NAMES = ("avx512_bf16", "avx2", "portable")
_chosen: int | None = None


def available() -> bool:
    """Whether the C++ kernels can be used here."""
    return _kernels is not None


def why_unavailable() -> str:
    """One sentence naming what is lost, or an empty string when the kernels are there."""
    if available():
        return ""
    return (
        f"the C++ CPU kernels are not installed ({_missing}); the reference torch backend runs instead, several times "
        "slower. Install a C++17 compiler and reinstall saccade to get them"
    )


def supported_isas() -> list[str]:
    """Instruction sets this build holds and this CPU runs, best first."""
    return list(_kernels.isas()) if _kernels is not None else []


def isa() -> str:
    """The instruction set in use; an empty string without kernels."""
    return supported_isas()[_isa_index()] if available() else ""


def set_isa(name: str | None) -> None:
    """Use the kernels of one instruction set from now on; None goes back to ``SACCADE_ISA`` or the best one."""
    global _chosen
    _chosen = None if name is None else _index_of(name, "instruction set")


def _index_of(name: str, what: str) -> int:
    known = supported_isas()
    if name not in known:
        why = "is not supported here" if name in _NAMES else "is unknown"
        raise SaccadeError(f"{what} {name!r} {why}; this CPU and build support: {', '.join(known) or 'none'}")
    return known.index(name)


def _isa_index() -> int:
    global _chosen
    if _chosen is None:
        wanted = os.environ.get("SACCADE_ISA", "")
        _chosen = _index_of(wanted, "SACCADE_ISA:") if wanted else 0
    return _chosen


def supports(q: Tensor, kv: KVView, selection: Selection) -> bool:
    """Whether :func:`attend` can serve this call: see :func:`reads`; every selection but Tokens and Ranking, if its
    units and KV heads do not cut across each other, and what a window leaves of these."""
    if isinstance(selection, Mixed):
        return all(supports(q, kv, part) for part in selection.parts)
    if isinstance(selection, Windowed):
        selection = selection.inner
    few, many = sorted((selection.units, kv.kv_heads))
    return type(selection) in (Dense, Band, Blocks, Lines, Tri) and many % few == 0 and reads(q, kv)


def reads(q: Tensor, kv: KVView) -> bool:
    """Whether the kernels can read these tensors: on the CPU, of one dtype (float32 or bfloat16), with a head_dim that
    is a multiple of 16."""
    return (
        available()
        and q.dtype in _STORAGE
        and q.dtype == kv.k_pool.dtype == kv.v_pool.dtype
        and q.device.type == kv.k_pool.device.type == "cpu"
        and q.shape[-1] == kv.head_dim
        and kv.head_dim % 16 == 0
        and kv.head_dim <= _MAX_HEAD_DIM
        and kv.block_size % 16 == 0
        and kv.k_pool.is_contiguous()
        and kv.v_pool.is_contiguous()
    )


def attend(
    q: Tensor,
    kv: KVView,
    selection: Selection,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` [heads, q_len, head_dim] over the selected keys of ``kv``.

    Returns ``out`` [heads, q_len, head_dim] in q's dtype and ``lse`` float32 [heads, q_len], the natural log of the sum
    of exponentials of the scaled (and soft-capped) logits; a row without keys gives ``(0, -inf)``. ``threads`` defaults
    to ``torch.get_num_threads()``. The caller has checked :func:`supports`.
    """
    call = _Call(q, kv, selection.shape, scale, softcap, threads)
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    if isinstance(selection, Mixed):
        for index, part in enumerate(selection.parts):
            active = selection.choice == index
            if bool(active.any()):
                _attend_part(call, part, out, lse, active.to(torch.uint8))
    else:
        _attend_part(call, selection, out, lse, None)
    return out, lse


def _attend_part(call: _Call, selection: Selection, out: Tensor, lse: Tensor, active: Tensor | None) -> None:
    if isinstance(selection, Windowed):
        starts = selection.starts.int()
        _attend_kind(call, selection.inner, out, lse, active, _Window(starts, selection.cone.sink_keys))
        _attend_own(call, selection, out, lse, active)
    else:
        _attend_kind(call, selection, out, lse, active, None)


def _attend_kind(
    call: _Call, selection: Selection, out: Tensor, lse: Tensor, active: Tensor | None, window: _Window | None
) -> None:
    rows = selection.shape.q_len
    if isinstance(selection, Tri):
        banded = min(selection.band_rows, rows)
        _attend_rows(call, selection.band, out, lse, active, window, 0, banded)
        _attend_rows(call, Dense(selection.shape), out, lse, active, window, banded, rows)
    else:
        _attend_rows(call, selection, out, lse, active, window, 0, rows)


def _attend_own(call: _Call, selection: Windowed, out: Tensor, lse: Tensor, active: Tensor | None) -> None:
    """What rows read that a window would leave without keys: their own one, with weight 1."""
    heads, group = selection.shape.heads // selection.units, selection.shape.group
    for unit in range(selection.units):
        rows = selection.emptied(unit)
        for head in range(unit * heads, (unit + 1) * heads) if rows.numel() else ():
            if active is not None and not active[head]:
                continue
            k, v = call.kv.take(selection.shape.rows[rows], head // group)
            logit = (call.q[head, rows].float() * k.float()).sum(-1) * call.scale
            lse[head, rows] = logit if call.softcap is None else call.softcap * torch.tanh(logit / call.softcap)
            out[head, rows] = v.to(out.dtype)


class _Window(NamedTuple):
    """What rows see of their selection: keys below ``sinks`` and from ``starts`` (int32 [q_len]) on."""

    starts: Tensor
    sinks: int


def _attend_rows(
    call: _Call,
    selection: Selection,
    out: Tensor,
    lse: Tensor,
    active: Tensor | None,
    seen: _Window | None,
    start: int,
    stop: int,
) -> None:
    """Rows ``start .. stop - 1`` (all of them for lists) of the query heads with ``active`` uint8 [heads] 1."""
    if start == stop:
        return
    kind, (window, sinks, block_size, q_blocks), lists = plain(selection)
    addresses = [part.data_ptr() for part in lists] + [0] * (4 - len(lists))
    _kernels.attend(
        *call.geometry(start, stop),
        (out[:, start:] if start else out).data_ptr(),
        (lse[:, start:] if start else lse).data_ptr(),
        out.shape[1],
        kind,
        window,
        sinks,
        block_size,
        selection.units,
        q_blocks,
        *addresses,
        0 if active is None else active.data_ptr(),
        0 if seen is None else seen.starts[start:].data_ptr(),
        0 if seen is None else seen.sinks,
    )


def plain(selection: Selection) -> tuple[int, tuple[int, int, int, int], list[Tensor]]:
    """A selection as the kernels are told of it: its kind; a band's window and sinks, block size and query blocks of
    lists; and the tensors of its lists, to be kept alive until the call returns."""
    if isinstance(selection, Band):
        return 1, (selection.window, selection.sinks, 0, 0), []
    if isinstance(selection, Blocks):
        lists = [selection.offsets, selection.indices]
        kind, numbers = 2, (0, 0, selection.block_size, selection.q_blocks)
    elif isinstance(selection, Lines):
        lists = [selection.v_offsets, selection.columns, selection.s_offsets, selection.distances]
        kind, numbers = 3, (0, 0, 0, 0)
    else:
        return 0, (0, 0, 0, 0), []
    return kind, numbers, [(part.long() if i % 2 == 0 else part.int()).contiguous() for i, part in enumerate(lists)]


class _Call:
    """The tensors of one call, checked and kept alive."""

    def __init__(
        self, q: Tensor, kv: KVView, shape: Shape, scale: float, softcap: float | None, threads: int | None
    ) -> None:
        if _kernels is None:
            raise SaccadeError(why_unavailable())
        if shape.k_len > kv.length or kv.table.numel() < kv.blocks:
            raise SaccadeError(f"the selection reads {shape.k_len} keys but the view holds {kv.length}")
        self.q = q if q.stride(-1) == 1 else q.contiguous()
        table = kv.table
        self.table = table if table.dtype == torch.int32 and table.is_contiguous() else table.int().contiguous()
        self.kv, self.shape, self.scale, self.softcap = kv, shape, scale, softcap
        self.threads = max(1, torch.get_num_threads() if threads is None else threads)

    def geometry(self, start: int, stop: int) -> tuple[int | float, ...]:
        """What every kernel wants to know, for query rows ``start .. stop - 1``; the order is that of geometry() in
        csrc/bindings.cpp."""
        q, kv = self.q, self.kv
        return (
            _isa_index(),
            self.threads,
            _STORAGE[q.dtype],
            (q[:, start:] if start else q).data_ptr(),
            q.stride(0),
            q.stride(1),
            kv.k_pool.data_ptr(),
            kv.v_pool.data_ptr(),
            self.table.data_ptr(),
            q.shape[0],
            kv.kv_heads,
            kv.head_dim,
            kv.block_size,
            stop - start,
            self.shape.q_start + start,
            self.scale,
            self.softcap or 0.0,
        )


def read_pass(data: Tensor, threads: int) -> None:
    """Read a contiguous tensor once, in order, each thread its share: what a bandwidth measurement repeats."""
    _kernels.read_pass(_isa_index(), threads, data.data_ptr(), data.numel() * data.element_size())


def gather_pass(data: Tensor, rows: Tensor, row_bytes: int, threads: int) -> None:
    """Read rows of ``row_bytes`` (a multiple of 64) of a contiguous tensor in the order of ``rows`` int32."""
    _kernels.gather_pass(_isa_index(), threads, data.data_ptr(), rows.data_ptr(), rows.numel(), row_bytes)
