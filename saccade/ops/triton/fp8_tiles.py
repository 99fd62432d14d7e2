"""``ops.fp8_tiles`` on the device: tiles of ``stride`` rows side by side in e4m3 with their scales, by one pass over
queries and one over keys, which are read where they lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from saccade.kv.view import KVView
from saccade.ops.fp8 import E4M3, LARGEST, LEAST
from saccade.ops.fp8_tiles import SAMPLES
from saccade.ops.triton.common import pad, pool_rows
from saccade.ops.triton.fp8 import scaled
from saccade.ops.triton.readers import load_keys
from saccade.selection import Shape

MULTIPLE = 128  # of bytes, which a tile's row is filled up to with zeros
TOGETHER = 8192  # values that a program of ``_pack`` has at once, where a tile has fewer


class Tiles(NamedTuple):
    """``values`` e4m3 [heads * tiles, width] times ``scale`` fp32 [heads * tiles]."""

    values: Tensor
    scale: Tensor

    def fetched(self, rows: int, channels: int) -> TensorDescriptor:
        """The values, for the copy engine."""
        return TensorDescriptor.from_tensor(self.values, [rows, channels])


def width_of(stride: int, head_dim: int) -> int:
    """Bytes of a tile."""
    return -(-stride * head_dim // MULTIPLE) * MULTIPLE


def pack_queries(q: Tensor, shape: Shape, stride: int) -> Tiles:
    """Of ``q`` [heads, q_len, head_dim], whose channels lie side by side, the tiles that it has a row of, each from its
    last row on."""
    first = shape.q_start // stride
    tiles = (shape.q_start + shape.q_len - 1) // stride + 1 - first
    out = _empty(len(q), tiles, stride, q.shape[2], q.device)
    _launch(out, q, q, q, (q.stride(0), q.stride(1), 0), (first * stride - shape.q_start, shape.q_len, tiles), stride)
    return out


def pack_keys(kv: KVView, k_len: int, stride: int, centred: bool) -> Tiles:
    """Of the first ``k_len`` keys all tiles, each from its first row on; ``centred``: less :func:`centre`."""
    paged, tiles = kv.paged(), -(-k_len // stride)
    out = _empty(kv.kv_heads, tiles, stride, kv.head_dim, paged.k.device)
    middle = centre(kv, k_len) if centred else paged.k
    strides = 0, 0, paged.head_stride
    _launch(out, paged.k, paged.block_table, middle, strides, (0, k_len, tiles), stride, kv, centred)
    return out


def centre(kv: KVView, k_len: int) -> Tensor:
    """``ops.fp8_tiles.centre``: fp32 [kv_heads, head_dim]."""
    paged = kv.paged()
    found = torch.empty(kv.kv_heads, kv.head_dim, dtype=torch.float32, device=paged.k.device)
    _centre[(kv.kv_heads,)](
        paged.k, paged.block_table, found, paged.head_stride, k_len, min(SAMPLES, k_len),
        KV_HEADS=kv.kv_heads, PAGE=kv.block_size, D=kv.head_dim, D_PAD=pad(kv.head_dim), KEYS=64, num_warps=8,
    )  # fmt: skip
    return found


def _empty(heads: int, tiles: int, stride: int, head_dim: int, device: torch.device) -> Tiles:
    width = width_of(stride, head_dim)
    make = torch.empty if width == stride * head_dim else torch.zeros
    values = make(heads * tiles, width, dtype=E4M3, device=device)
    return Tiles(values, torch.empty(heads * tiles, dtype=torch.float32, device=device))


def _launch(
    out: Tiles,
    rows: Tensor,
    table: Tensor,
    middle: Tensor,
    strides: tuple[int, int, int],
    numbers: tuple[int, int, int],
    stride: int,
    kv: KVView | None = None,
    centred: bool = False,
) -> None:
    tiles, head_dim = numbers[2], rows.shape[-1] if kv is None else kv.head_dim
    channels = pad(head_dim)
    together = max(1, TOGETHER // (stride * channels))
    _pack[(-(-tiles // together), len(out.scale) // tiles)](
        rows, table, middle, *out, *strides, *numbers,
        KV_HEADS=1 if kv is None else kv.kv_heads, PAGE=1 if kv is None else kv.block_size, PAGED=kv is not None,
        CENTRED=centred, D=head_dim, D_PAD=channels, STRIDE=stride, WIDTH=out.values.shape[1], TILES=together,
        LARGEST=LARGEST, LEAST=LEAST, num_warps=4 if stride * channels <= TOGETHER else 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_head", "k_len", "count"], do_not_specialize_on_alignment=["table"])
def _centre(
    k_pool, table, found, table_head, k_len, count,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Of one KV head the mean of ``count`` keys, evenly spaced."""
    head = tl.program_id(0)
    table += head.to(tl.int64) * table_head
    channel = tl.arange(0, D_PAD)
    total = tl.zeros([D_PAD], tl.float32)
    for start in tl.range(0, count, KEYS):
        place = start + tl.arange(0, KEYS)
        inside = place < count
        key = (place.to(tl.int64) * k_len // count).to(tl.int32)
        at = pool_rows(table, key, inside, head, KV_HEADS, PAGE)[:, None]
        x = load_keys(k_pool, at, channel[None, :], inside[:, None], D, tl.float32)
        total += tl.sum(x.to(tl.float32), 0)
    mean = total / count
    mean = tl.where(tl.abs(mean) < float("inf"), mean, 0.0)
    tl.store(found + head * D + channel, mean, mask=channel < D)


@triton.jit(
    do_not_specialize=["table_head", "begin", "count", "tiles"], do_not_specialize_on_alignment=["table", "centre"]
)
def _pack(
    rows, table, centre, values, scales, q_head, q_row, table_head, begin, count, tiles,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """``TILES`` tiles of one head, the first of which begins at row ``begin`` (0, or before it) of ``count``: keys in
    pages, from first to last, or queries, from last to first."""
    head = tl.program_id(1)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    within, channel = tl.arange(0, STRIDE), tl.arange(0, D_PAD)
    row = begin + tile[:, None] * STRIDE + within[None, :]
    there = (row >= 0) & (row < count)
    real = there[:, :, None] & (channel < D)[None, None, :]
    if PAGED:
        at = pool_rows(table + head.to(tl.int64) * table_head, row, there, head, KV_HEADS, PAGE)
        x = load_keys(rows, at[:, :, None], channel[None, None, :], there[:, :, None], D, tl.float32)
        step = within
    else:
        at = head.to(tl.int64) * q_head + row.to(tl.int64) * q_row
        x = tl.load(rows + at[:, :, None] + channel[None, None, :], mask=real, other=0.0)
        step = STRIDE - 1 - within
    x = x.to(tl.float32)
    if CENTRED:
        middle = tl.load(centre + head * D + channel, mask=channel < D, other=0.0)
        x = tl.where(real, x - middle[None, None, :], 0.0)
    largest = tl.max(tl.max(tl.abs(x), 2), 1)
    found, scale = scaled(x, largest[:, None, None], LARGEST, LEAST)
    line = head.to(tl.int64) * tiles + tile
    out = values + line[:, None, None] * WIDTH + (step * D)[None, :, None] + channel[None, None, :]
    kept = (tile < tiles)[:, None, None] & (channel < D)[None, None, :]
    tl.store(out, found, mask=kept)
    tl.store(scales + line, tl.reshape(scale, (TILES,)), mask=tile < tiles)
