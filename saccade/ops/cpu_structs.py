"""Calls of the C++ kernels as structs of named fields: what csrc/calls.h says, made of tensors.

Kernels read tensors by address. Who makes a struct keeps its tensors alive until the call returns.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.block_codes import BlockCodes
from saccade.kv.row_formats import format_of
from saccade.kv.view import KVView, Paged
from saccade.selection import Band, Blocks, Lines, Selection, Shape

native: Any = None  # the structs, and the few kernels that are the same for every instruction set
missing = ""
try:
    native = importlib.import_module("saccade._kernels")
except ImportError as error:  # installed without a compiler, or built for another Python
    missing = str(error)

STORAGE = {torch.float32: 0, torch.bfloat16: 1}
_DENSE, _BAND, _BLOCKS, _LINES = range(4)
ALL_KEYS: Any = None if native is None else native.Keys(kind=_DENSE)


def address(tensor: Tensor | None) -> int:
    """Where the values of a contiguous tensor begin; 0 without one. SaccadeError where they do not lie in order."""
    if tensor is None:
        return 0
    if not tensor.is_contiguous():
        raise SaccadeError(
            f"a kernel reads tensors whose values lie in order; got {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}: make it contiguous()"
        )
    return tensor.data_ptr()


def pool_of(k: Tensor, v: Tensor, dtype: torch.dtype, value_dim: int | None = None) -> Any:
    """Keys and values of all slots, contiguous [slots, kv_heads, block_size, width] each: rows of ``dtype``, however
    they are stored. ``value_dim``: as KVFormat's; kernels leave what is behind those channels 0 or as it comes."""
    slots, kv_heads, block_size, width = k.shape
    rows = format_of(k, dtype)
    return native.Pool(
        k=k.data_ptr(),
        v=v.data_ptr(),
        slots=slots,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=rows.head_dim(width),
        storage=STORAGE[dtype],
        format=rows.number,
        value_dim=value_dim or 0,
    )


def table_of(table: Tensor) -> Any:
    """An int32 block table [kv_heads or 1, blocks] with contiguous rows."""
    rows, blocks = table.shape
    return native.BlockTable(slots=table.data_ptr(), head_stride=0 if rows == 1 else table.stride(0), blocks=blocks)


def codes_of(codes: BlockCodes) -> Any:
    """Rounded summaries."""
    return native.BlockCodes(
        codes=address(codes.codes),
        range=address(codes.range),
        frame=address(codes.frame),
        tiles=codes.tiles,
        blocks=codes.blocks,
    )


def output_of(out: Tensor, lse: Tensor) -> Any:
    """Where a call writes: ``out`` [heads, rows, head_dim] and ``lse`` fp32 [heads, rows], both contiguous."""
    return native.Output(out=out.data_ptr(), lse=lse.data_ptr(), rows=out.shape[1])


def keys_of(selection: Selection, **masks: int) -> tuple[Any, Sequence[Tensor]]:
    """Which keys a call reads, with what else Keys may say of its rows: a struct, and the tensors that must outlive the
    call."""
    if isinstance(selection, Band):
        return native.Keys(kind=_BAND, window=selection.window, sinks=selection.sinks, **masks), ()
    if isinstance(selection, Blocks):
        offsets, indices = selection.offsets.long().contiguous(), selection.indices.int().contiguous()
        blocks = native.Keys(
            kind=_BLOCKS,
            block_size=selection.block_size,
            units=selection.units,
            q_blocks=selection.q_blocks,
            offsets=offsets.data_ptr(),
            indices=indices.data_ptr(),
            **masks,
        )
        return blocks, (offsets, indices)
    if isinstance(selection, Lines):
        columns, distances = selection.columns.int().contiguous(), selection.distances.int().contiguous()
        v_offsets, s_offsets = selection.v_offsets.long().contiguous(), selection.s_offsets.long().contiguous()
        lines = native.Keys(
            kind=_LINES,
            units=selection.units,
            offsets=v_offsets.data_ptr(),
            indices=columns.data_ptr(),
            distance_offsets=s_offsets.data_ptr(),
            distances=distances.data_ptr(),
            **masks,
        )
        return lines, (v_offsets, columns, s_offsets, distances)
    return native.Keys(kind=_DENSE, **masks) if masks else ALL_KEYS, ()


def band_keys(window: int, sinks: int) -> Any:
    """The first ``sinks`` and the last ``window`` keys of each row."""
    return native.Keys(kind=_BAND, window=window, sinks=sinks)


class Reads:
    """What a call reads: queries and a paged view, kept alive."""

    __slots__ = ("_strides", "_tensors", "kv", "pool", "q", "scale", "shape", "softcap", "table", "threads")

    def __init__(
        self, q: Tensor, kv: KVView, shape: Shape, scale: float, softcap: float | None, threads: int | None
    ) -> None:
        paged = kv.paged()
        check_length(shape, paged)
        strides = q.stride()
        if strides[2] != 1:
            q = q.contiguous()
            strides = q.stride()
        self.q, self._strides, self._tensors = q, strides, paged
        self.kv, self.shape, self.scale, self.softcap = kv, shape, scale, softcap
        self.threads = max(1, torch.get_num_threads() if threads is None else threads)
        layout = paged.format
        self.pool = pool_of(paged.k, paged.v, layout.dtype, layout.value_dim)
        self.table = table_of(paged.block_table)

    def queries(self, start: int = 0, stop: int = 1) -> Any:
        """Query rows ``start .. stop - 1``."""
        q, (head_stride, row_stride, _) = self.q, self._strides
        return native.Queries(
            q=(q[:, start:] if start else q).data_ptr(),
            head_stride=head_stride,
            row_stride=row_stride,
            heads=q.shape[0],
            q_len=stop - start,
            q_start=self.shape.q_start + start,
            scale=self.scale,
            softcap=self.softcap or 0.0,
        )


def check_length(shape: Shape, paged: Paged) -> None:
    """SaccadeError where a selection reads beyond its view."""
    if shape.k_len > paged.length:
        raise SaccadeError(f"the selection reads {shape.k_len} keys but the view holds {paged.length}")
