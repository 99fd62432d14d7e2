"""Where blocks lie, looked up on a GPU; and rows into slots and out of them, in one launch and one pass: the host knows
no slots there, and torch's indexing takes a pass for the index and one for the order of the axes. Blocks between the
device and pinned host memory go by a kernel that reads and writes the latter by its address, however scattered they
are. This module is a kv.rows.RowMover."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from saccade.kv.paged import Paged
from saccade.kv.rows import Blocks, filler, summarize_rows
from saccade.ops.triton.block_summaries import CHANNELS, MOST_CHANNELS, summarize
from saccade.ops.triton.common import pad
from saccade.ops.triton.readers import load_keys, store_rows

__all__ = [
    "copy_blocks",
    "filler",
    "gather",
    "launch_copies",
    "resolve",
    "store",
    "summarize",
    "summarize_rows",
    "tiles_of",
]

LONG = 2048  # rows from which on kernels of prefill lay keys out in one piece: for fewer it costs more than it saves
RESOLVED = 1024  # entries of a block table that a program looks up
COPIERS = 32  # programs that copy blocks at once: as many as fill a link of 55 GB/s, few beside what computes
WORDS = 1024  # of 8 bytes that one of them has on the way


def store(paged: Paged, start: int, k: Tensor, v: Tensor) -> None:
    """Write ``k``, ``v`` [kv_heads, t, head_dim], of any strides, to positions ``start ..`` of ``paged``."""
    heads, count, head_dim = k.shape
    size = paged.format.block_size
    k, v = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (k, v))
    if count:
        parts, channels = len(paged.format.parts), _channels(head_dim)
        blocks, cuts = -(-(start + count) // size) - start // size, triton.cdiv(head_dim, channels)
        _move[(blocks, heads, parts * cuts)](
            paged.k, paged.v, paged.block_table, k, v, start, count, paged.head_stride, *k.stride()[:2],
            *v.stride()[:2],
            HEADS=heads, SIZE=size, D=head_dim, WIDTH=channels, CUTS=cuts, STORES=True, num_warps=4,
        )  # fmt: skip


def gather(pool: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    """Positions ``start .. stop - 1`` of ``pool`` [slots, kv_heads, block_size, head_dim], whose block b of head g lies
    in slot ``block_table[g, b]`` (int32 [kv_heads or 1, blocks]), in one piece: [kv_heads, stop - start, head_dim]."""
    _, heads, size, head_dim = pool.shape
    out = torch.empty(heads, stop - start, head_dim, dtype=pool.dtype, device=pool.device)
    if stop > start:
        table_head = 0 if block_table.shape[0] == 1 else block_table.stride(0)
        channels = _channels(head_dim)
        cuts = triton.cdiv(head_dim, channels)
        _move[(-(-stop // size) - start // size, heads, cuts)](
            pool, pool, block_table, out, out, start, stop - start, table_head, *out.stride()[:2], *out.stride()[:2],
            HEADS=heads, SIZE=size, D=head_dim, WIDTH=channels, CUTS=cuts, STORES=False, num_warps=4,
        )  # fmt: skip
    return out


def _channels(head_dim: int) -> int:
    """Of a block's rows, that one program moves."""
    return pad(head_dim, 1) if head_dim <= MOST_CHANNELS else CHANNELS


def tiles_of(keys: Tensor, rows: int, channels: int | None = None) -> TensorDescriptor:
    """Tiles of ``rows`` of contiguous ``keys`` [kv_heads, n, head_dim] for the copy engine, rows of all heads numbered
    through; of so many ``channels``, or of all."""
    return TensorDescriptor.from_tensor(keys.flatten(0, 1), [rows, pad(channels or keys.shape[-1])])


def copy_blocks(source: Blocks, which: Tensor, target: Blocks, where: Tensor) -> None:
    """Copy blocks ``which`` of ``source`` to ``where`` in ``target``: keys and values, or keys alone, [blocks,
    kv_heads, block_size, head_dim] each, contiguous, on a device or in host memory pinned for it; both int64 [n], on
    the host."""
    device = next((part.device for part in (source[0], target[0]) if part.is_cuda), source[0].device)
    listed = torch.cat([torch.tensor([len(which)], device="cpu"), which, where])
    if device.type == "cuda":
        listed = listed.pin_memory().to(device, non_blocking=True)
    launch_copies(source, listed[1 : 1 + len(which)], target, listed[1 + len(which) :], listed, len(which))


def launch_copies(source: Blocks, which: Tensor, target: Blocks, where: Tensor, count: Tensor, most: int) -> None:
    """As :func:`copy_blocks`, with ``which`` and ``where`` on the device, of one dtype, of which the first ``count``
    (an integer there, at most ``most``) are taken. ``which`` may be negative: that one is passed over."""
    words = words_of(source[0], 1)
    if not most or not words:
        return
    tiles = -(-words // WORDS)
    _copy[(min(COPIERS, most * len(source) * tiles),)](
        source[0].data_ptr(), source[-1].data_ptr(), target[0].data_ptr(), target[-1].data_ptr(), which, where, count,
        PARTS=len(source), PIECES=words, TILES=tiles, WIDTH=WORDS, num_warps=4,
    )  # fmt: skip


def words_of(part: Tensor, lists: int) -> int:
    """Words of 8 bytes of the keys, or of the values, of a block in ``part``, or of one KV head of it where there are
    ``lists`` for each."""
    return part[0].numel() * part.element_size() // 8 // lists if len(part) else 0


def resolve(
    slots: Tensor, blocks: Tensor, lengths: Tensor, block_size: int, longest: int, tables: Tensor, absent: int = -1
) -> None:
    """Look up where the blocks of each row's keys lie now, in one launch that a CUDA graph can hold: ``tables`` int32
    [layers, rows, kv_heads or 1, >= blocks] becomes, up to a row's length, ``slots`` int32 [layers, kv_heads or 1,
    logical blocks] at ``blocks`` int32 [rows, >= blocks], ``absent`` where a part is not resident. ``lengths`` int32
    [rows], in keys and at most ``longest``; entries beyond them are left as they are. Rows of tables and of blocks are
    contiguous, ``slots`` altogether."""
    layers, heads, logical = slots.shape
    count = -(-longest // block_size)
    if count and blocks.shape[0]:
        _resolve[(layers * heads, blocks.shape[0], -(-count // RESOLVED))](
            slots, blocks, lengths, tables, logical, blocks.stride(0), *tables.stride()[:3], absent, HEADS=heads,
            SIZE=block_size, STEP=RESOLVED, num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["k_from", "v_from", "k_to", "v_to"], do_not_specialize_on_alignment=["which", "where", "count"]
)
def _copy(
    k_from, v_from, k_to, v_to, which, where, count, PARTS: tl.constexpr, PIECES: tl.constexpr, TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    copy_lists(
        tl.program_id(0), tl.num_programs(0), k_from, v_from, k_to, v_to, which, where, count, 0, 0, 1, 1, PARTS,
        PIECES, TILES, WIDTH,
    )  # fmt: skip


@triton.jit
def copy_lists(
    program, programs, k_from, v_from, k_to, v_to, which, where, count, list_row, count_row,
    LISTS: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The share of one of ``programs`` that copy: tiles of ``WIDTH`` words of 8 bytes, of the keys' halves of blocks
    and, of two ``PARTS``, of the values', one after the other; the lists' tiles follow each other, so that programs
    have the same share of all of them. ``PADDED``: a power of two from ``LISTS`` on. The addresses are integers, for
    Triton takes no tensor of the host; it gives one below 2^31, as memory of the heap may have, a type of its own."""
    word = tl.pointer_type(tl.int64)
    step = tl.arange(0, WIDTH)
    lists = tl.arange(0, PADDED)
    ends = tl.cumsum(tl.load(count + lists * count_row, mask=lists < LISTS, other=0).to(tl.int32) * PARTS * TILES, 0)
    for tile in tl.range(program, tl.max(ends, 0), programs):
        before = ends <= tile
        own = tl.sum(before.to(tl.int32), 0)
        rest = tile - tl.max(tl.where(before, ends, 0), 0)
        item, part = rest // (PARTS * TILES), rest % (PARTS * TILES)
        block = tl.load(which + own * list_row + item).to(tl.int64)
        place = tl.load(where + own * list_row + item).to(tl.int64)
        source, target = tl.cast(k_from, tl.int64), tl.cast(k_to, tl.int64)
        if part >= TILES:
            source, target = tl.cast(v_from, tl.int64), tl.cast(v_to, tl.int64)
            part -= TILES
        at = part * WIDTH + step
        inside = at < tl.where(block >= 0, PIECES, 0)
        ours = tl.multiple_of((source + (block * LISTS + own) * PIECES * 8).to(word), 16)
        theirs = tl.multiple_of((target + (place * LISTS + own) * PIECES * 8).to(word), 16)
        tl.store(theirs + at, tl.load(ours + at, mask=inside, other=0), mask=inside)


@triton.jit(
    do_not_specialize=["logical", "block_row", "table_layer", "table_row", "table_head", "absent"],
    do_not_specialize_on_alignment=["slots", "blocks", "tables"],
)
def _resolve(
    slots, blocks, lengths, tables, logical, block_row, table_layer, table_row, table_head, absent,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``STEP`` blocks of one row in one layer, of one head's slots or of those that all heads share."""
    part, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    table = tables + (part // HEADS) * table_layer + row * table_row + (part % HEADS) * table_head
    resolve_row(
        slots + part * logical, blocks + row * block_row, tl.load(lengths + row), table, tl.program_id(2), absent,
        SIZE, STEP,
    )  # fmt: skip


@triton.jit
def resolve_row(slots, blocks, length, table, number, absent, SIZE: tl.constexpr, STEP: tl.constexpr):
    """The ``number``-th ``STEP`` blocks of a row of ``length`` keys: their ``slots`` into ``table``."""
    at = number * STEP + tl.arange(0, STEP)
    real = at < tl.cdiv(length, SIZE)
    block = tl.load(blocks + at, mask=real, other=0)
    slot = tl.load(slots + block, mask=real, other=-1)
    tl.store(table + at, tl.where(slot < 0, absent, slot), mask=real)


@triton.jit(do_not_specialize=["start", "count", "table_head"])
def _move(
    k_pool, v_pool, table, k, v, start, count, table_head, k_head, k_row, v_head, v_row,
    HEADS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CUTS: tl.constexpr,
    STORES: tl.constexpr,
):  # fmt: skip
    """One block of one head, of the keys or of the values, or some channels of it."""
    block, head = start // SIZE + tl.program_id(0), tl.program_id(1).to(tl.int64)
    pool, rows, head_stride, row_stride = k_pool, k, k_head, k_row
    if tl.program_id(2) >= CUTS:
        pool, rows, head_stride, row_stride = v_pool, v, v_head, v_row
    slot = tl.load(table + head * table_head + block).to(tl.int64)
    within = tl.arange(0, SIZE)[:, None]
    channel = tl.program_id(2) % CUTS * WIDTH + tl.arange(0, WIDTH)[None, :]
    row = block.to(tl.int64) * SIZE + within - start
    real = (row >= 0) & (row < count) & (channel < D)
    place = (slot * HEADS + head) * SIZE + within
    plain = rows + head * head_stride + row * row_stride + channel
    if STORES:
        store_rows(pool, place, channel, tl.load(plain, mask=real, other=0.0).to(pool.dtype.element_ty), real, D)
    else:
        tl.store(plain, load_keys(pool, place, channel, real, D), mask=real)
