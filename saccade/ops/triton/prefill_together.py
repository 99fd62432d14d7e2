"""Chunks of several sequences' prefills in one launch: a table says which sequence and which tile of rows a program
serves, and where that sequence's keys and lists lie. Short prompts by themselves leave most of a GPU idle, and as many
launches as requests take longer than what they do.

A program does what ``prefill.py`` does for the same tile, so that what a request gets does not hang on its company.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.machine import sent
from saccade.ops.layout import flat, rows
from saccade.ops.triton.common import LN2, LOG2E, pad, precision
from saccade.ops.triton.few_rows import pays
from saccade.ops.triton.pages import LONG
from saccade.ops.triton.prefill import BAND, BLOCKS, DENSE, attend_tile, config_for
from saccade.selection import Band, Blocks, Dense, Selection

NUMBERS = 8  # of a sequence in the table
TILE_BLOCKS = (64, 128)  # block sizes that the tiles of one launch may have


class Part(NamedTuple):
    """A sequence's rows, from row ``first`` of the packed queries on; ``kv``: a view of their pool that holds their
    keys."""

    first: int
    kv: KVView
    selection: Selection


def form(q: Tensor, part: Part) -> tuple[int, ...] | None:
    """What parts of one launch have in common; None where a call of its own serves it as well: many rows, whose keys
    are laid out first, few rows at the end of many keys, latents, and other selections. The kernels serve the part (see
    ``dispatch.serves``)."""
    selection = part.selection
    here = q[:, part.first : part.first + selection.shape.q_len]
    if not 1 < selection.shape.q_len < LONG or part.kv.format.joined:
        return None
    if type(selection) is Dense:
        return None if pays(here, part.kv, selection.shape.q_start) else (DENSE,)
    if type(selection) is Band:
        return BAND, selection.window, selection.sinks
    if type(selection) is Blocks and selection.block_size in TILE_BLOCKS:
        return BLOCKS, selection.block_size, selection.units
    return None


def attend_together(
    q: Tensor, parts: Sequence[Part], out: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """``q`` [heads, rows, head_dim]; ``parts`` of one :func:`form`, each of which says where its rows are. Writes them
    into ``out``, like q, and returns ``lse`` float32 [heads, rows] (natural log), of the parts' rows alone.

    SaccadeError where the parts have no form or no pool in common, or ``out`` does not fit."""
    forms = {form(q, part) for part in parts}
    common = next(iter(forms), None)
    if len({part.kv.paged().k.data_ptr() for part in parts}) > 1:
        raise SaccadeError("parts of one launch lie in one pool; call attend for each")
    if len(forms) != 1 or common is None:
        raise SaccadeError(f"parts of one launch have one form, got {sorted(map(str, forms))}; call attend for each")
    if out.shape != q.shape or out.dtype != q.dtype or out.stride(-1) != 1:
        raise SaccadeError(
            f"out must be {q.dtype} {tuple(q.shape)} with channels side by side, got {out.dtype} {tuple(out.shape)} "
            f"with strides {out.stride()}; use torch.empty_like(q)"
        )
    heads, count, head_dim = q.shape
    q = rows(q)
    if scale <= 0:
        q, scale = q * scale, 1.0
    first = parts[0]
    config = config_for(q[:, : first.selection.shape.q_len], first.selection)  # which asks whether rows are many
    size = common[1] if common[0] == BLOCKS else config.rows
    table, programs, kept = _table(parts, config.rows, q.device)
    lse = torch.empty(heads, count, dtype=torch.float32, device=q.device)
    pool = first.kv.paged()
    _together[(heads, programs)](
        q, pool.k, pool.v, table, lse, out, lse, q.stride(0), q.stride(1), out.stride(0), out.stride(1), count,
        len(parts), *(common[1:] if common[0] == BAND else (0, 0)), scale * LOG2E, softcap or 0.0, LN2,
        HEADS=heads, KV_HEADS=first.kv.kv_heads, UNITS=common[2] if common[0] == BLOCKS else 1, D=head_dim,
        D_PAD=pad(head_dim), PAGE=first.kv.block_size, SIZE=size, ROWS=config.rows, KEYS=min(config.keys, size),
        MODE=common[0], CAPPED=softcap is not None, PRECISION=precision(q.dtype), STAGES=config.stages,
        NUMBERS=NUMBERS, num_warps=config.warps,
    )  # fmt: skip
    del kept  # the kernel is in line before what takes its memory next
    return lse


def _table(parts: Sequence[Part], tile: int, device: torch.device) -> tuple[Tensor, int, list[Tensor]]:
    """int64: NUMBERS of each part, then for each program its part and its tile of rows, those with most keys first; how
    many programs; and the tensors of which it has addresses."""
    numbers: list[int] = []
    kept: list[Tensor] = []
    work: list[tuple[int, int, int]] = []
    for at, (first, kv, selection) in enumerate(parts):
        shape, paged = selection.shape, kv.paged()
        selection = selection.to(device)
        offsets = indices = paged.block_table
        if isinstance(selection, Blocks):
            offsets, indices = flat(selection.offsets, torch.int64), flat(selection.indices, torch.int32)
        kept += [paged.block_table, offsets, indices]
        numbers += [paged.block_table.data_ptr(), paged.head_stride, offsets.data_ptr(), indices.data_ptr()]
        numbers += [shape.q_start, shape.q_len, first, 0]
        last = (shape.q_start + shape.q_len - 1) // tile
        work += [(-row, at, row) for row in range(shape.q_start // tile, last + 1)]
    work.sort()
    for _, at, row in work:
        numbers += [at, row]
    return sent(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device), len(work), kept


@triton.jit(do_not_specialize=["count", "parts", "window", "sinks"])
def _together(
    q_ptr, k_pool, v_pool, table, none, out, lse, q_head, q_row, out_head, out_row, count, parts, window, sinks,
    scale_log2, softcap, ln2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, MODE: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    work = table + parts * NUMBERS + 2 * tl.program_id(1)
    part, tile = table + tl.load(work) * NUMBERS, tl.load(work + 1).to(tl.int32)
    blocks = tl.load(part).to(tl.pointer_type(tl.int32))
    table_head = tl.load(part + 1)
    offsets = tl.load(part + 2).to(tl.pointer_type(tl.int64))
    indices = tl.load(part + 3).to(tl.pointer_type(tl.int32))
    q_start, q_len = tl.load(part + 4).to(tl.int32), tl.load(part + 5).to(tl.int32)
    first = tl.load(part + 6)
    attend_tile(
        q_ptr + first * q_row, k_pool, k_pool, v_pool, blocks, offsets, indices, none, none, none, 0,
        out + first * out_row, lse + first, q_head, q_row, table_head, out_head, out_row, count, tl.program_id(0), tile,
        q_start, q_len, window, sinks, scale_log2, softcap, ln2, HEADS, KV_HEADS, UNITS, D, D_PAD, 0, D, D_PAD, PAGE,
        SIZE, ROWS, KEYS, MODE, CAPPED, PRECISION, STAGES, False, 0, 0.0,
    )  # fmt: skip
