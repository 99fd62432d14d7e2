"""The C++ CPU kernels: attention over ``Dense``, ``Band`` and ``Blocks`` on a paged KV view.

``saccade._kernels`` holds one kernel set per instruction set and the best one this CPU runs is used. ``SACCADE_ISA`` in
the environment, or :func:`set_isa`, picks another: ``avx512_bf16``, ``avx2`` or ``portable``.

Rounding differs between the sets (and from the reference), but within one set a result depends only on the call: not on
the number of threads, nor on what else runs.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.selection import Band, Blocks, Dense, Selection

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
    """Whether :func:`attend` can serve this call: CPU tensors of one dtype (float32 or bfloat16), head_dim a multiple
    of 16, and a Dense, Band or Blocks selection whose units and KV heads do not cut across each other."""
    if isinstance(selection, Blocks):
        few, many = sorted((selection.units, kv.kv_heads))
        if many % few:
            return False
    return (
        available()
        and type(selection) in (Dense, Band, Blocks)
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
    if _kernels is None:
        raise SaccadeError(why_unavailable())
    shape = selection.shape
    heads, q_len, head_dim = q.shape
    if shape.k_len > kv.length or kv.table.numel() < kv.blocks:
        raise SaccadeError(f"the selection reads {shape.k_len} keys but the view holds {kv.length}")
    if q.stride(-1) != 1:
        q = q.contiguous()
    table = kv.table if kv.table.dtype == torch.int32 and kv.table.is_contiguous() else kv.table.int().contiguous()
    out = torch.empty(heads, q_len, head_dim, dtype=q.dtype)
    lse = torch.empty(heads, q_len, dtype=torch.float32)
    kind, window, sinks, block_size, units, q_blocks, offsets, indices = 0, 0, 0, 0, 0, 0, 0, 0
    lists: tuple[Tensor, Tensor] | None = None  # kept alive until the call returns
    if isinstance(selection, Band):
        kind, window, sinks = 1, selection.window, selection.sinks
    elif isinstance(selection, Blocks):
        kind, block_size, units, q_blocks = 2, selection.block_size, selection.units, selection.q_blocks
        lists = (selection.offsets.long().contiguous(), selection.indices.int().contiguous())
        offsets, indices = lists[0].data_ptr(), lists[1].data_ptr()
    _kernels.attend(
        _isa_index(),
        max(1, torch.get_num_threads() if threads is None else threads),
        _STORAGE[q.dtype],
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        kv.k_pool.data_ptr(),
        kv.v_pool.data_ptr(),
        table.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        heads,
        kv.kv_heads,
        head_dim,
        kv.block_size,
        q_len,
        shape.q_start,
        scale,
        softcap or 0.0,
        kind,
        window,
        sinks,
        block_size,
        units,
        q_blocks,
        offsets,
        indices,
    )
    return out, lse


def read_pass(data: Tensor, threads: int) -> None:
    """Read a contiguous tensor once, in order, each thread its share: what a bandwidth measurement repeats."""
    _kernels.read_pass(_isa_index(), threads, data.data_ptr(), data.numel() * data.element_size())


def gather_pass(data: Tensor, rows: Tensor, row_bytes: int, threads: int) -> None:
    """Read rows of ``row_bytes`` (a multiple of 64) of a contiguous tensor in the order of ``rows`` int32."""
    _kernels.gather_pass(_isa_index(), threads, data.data_ptr(), rows.data_ptr(), rows.numel(), row_bytes)
