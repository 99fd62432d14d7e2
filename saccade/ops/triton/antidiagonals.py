"""XAttention's choice on the device: key blocks by strided antidiagonal sums, up to a share of each query block.

Keys are read once: a kernel takes the products of whole tiles of ``stride`` x ``stride`` pairs, which are as many
shorter products of strided rows, and keeps of every row of tiles and key block the logarithm of what its tiles weigh.
Over keys in one piece these are one product of matrices with ``stride`` rows side by side, whose rows may be in e4m3
(``fp8_tiles``). A second one, a program for each query block, brings these rows to a sum of 1, adds them, and finds
which blocks reach the threshold. Nothing goes to the host, and sums are added in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from saccade.kv.view import KVView
from saccade.ops.layout import rows as in_rows
from saccade.ops.triton.common import LOG2E, cap_logits, is_hopper, pad, pool_rows, precision
from saccade.ops.triton.fp8_tiles import pack_keys, pack_queries, width_of
from saccade.ops.triton.pages import LONG, gather
from saccade.ops.triton.reach import NO_BAR, Reach
from saccade.ops.triton.readers import load_keys
from saccade.selection import Blocks, Shape


@dataclass(frozen=True)
class Config:
    """Rows of tiles and tiles of keys of a program, channels of a step, warps and pipeline depth; ``copy``: lay queries
    and keys out in one piece first and fetch them by the copy engine. ``band``: programs of as many rows of tiles in
    turn read the same keys. ``fp8``: what is laid out is in e4m3."""

    rows: int = 128
    keys: int = 128
    channels: int = 128
    warps: int = 8
    stages: int = 3
    copy: bool = False
    band: int = 16
    fp8: bool = False


def config_for(q: Tensor, each: int, fp8: bool = False) -> Config:
    """``each``: tiles of a block."""
    head_dim = q.shape[-1]
    if fp8:
        return Config(128, 128, 128, 4, 3 if is_hopper(q.device) else 2, copy=True, fp8=True)
    if q.element_size() > 2 or head_dim > 128:
        return Config(32, max(32, each), pad(head_dim), 4, 2)
    if is_hopper(q.device) and q.shape[1] >= LONG and head_dim == pad(head_dim):
        return Config(128, 128, 64, 4, 3, copy=True)
    return Config(channels=pad(head_dim))


def choose(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    stride: int,
    block_size: int,
    threshold: float,
    lagging: int,
    scale: float,
    softcap: float | None = None,
    fp8: bool = False,
    window: int = 1,
) -> Blocks:
    """The lists of ``methods.xattention`` for ``q`` [heads, q_len, head_dim]: of each query block the first key
    block and the last ``window``, the diagonal one among them, then the heaviest others (ties to the lower one) while
    what is there is short of ``threshold``; ``lagging``: as ``xattention._reach`` says. Sums are float32; ``fp8``: of
    products of rows in e4m3, on a GPU that ``triton.serves_fp8_tiles`` has nothing against."""
    lagging = lagging if threshold > 0 else 0  # nothing lacks a share of 0
    config = config_for(q, block_size // stride, fp8)
    found = _run(q, kv, shape, stride, block_size, threshold, lagging, scale, softcap, False, config, window)
    return found.lists(shape, block_size)


def shares(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    stride: int,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    fp8: bool = False,
) -> Tensor:
    """``ops.scores.antidiagonal_shares``: fp32 [heads, q_blocks, k_blocks]."""
    config = config_for(q, block_size // stride, fp8)
    return _run(q, kv, shape, stride, block_size, 0.0, 0, scale, softcap, True, config).shares


def _run(
    q: Tensor,
    kv: KVView,
    shape: Shape,
    stride: int,
    block_size: int,
    threshold: float,
    lagging: int,
    scale: float,
    softcap: float | None,
    wants_shares: bool,
    config: Config,
    window: int = 1,
) -> Reach:
    heads, q_len, head_dim = q.shape
    given, paged = in_rows(q), kv.paged()
    each = block_size // stride  # tiles of a block
    first, last = shape.q_start // stride, (shape.q_start + q_len - 1) // stride
    own, tiles = first // each, last - first + 1
    q_blocks, k_blocks = last // each - own + 1, -(-shape.k_len // block_size)
    found = Reach(q, (q_blocks, k_blocks), own, tiles, each, first - own * each, wants_shares)
    weights, together = found.weights, len(found.weights)
    options = {
        "GROUP": heads // kv.kv_heads, "STRIDE": stride, "EACH": each, "ROWS": config.rows, "KEYS": config.keys,
        "CAPPED": softcap is not None, "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    if config.fp8:
        keys = pack_keys(kv, shape.k_len, stride, centred=softcap is None)
        key_side, key_scale, width = keys.fetched(config.keys, config.channels), keys.scale, width_of(stride, head_dim)
    elif config.copy:
        row_side, key_side = _row_tiles(given, shape, stride, config), _key_tiles(kv, shape, stride, config)
        row_scale, key_scale, width = weights, weights, stride * head_dim
    for head in range(0, heads, together):
        count = min(together, heads - head)
        numbers = shape.q_start, q_len, shape.k_len, first, tiles, k_blocks, scale * LOG2E, softcap or 0.0
        if config.fp8:  # of as many heads as go together, so that they take no more room
            packed = pack_queries(given[head : head + count], shape, stride)
            row_side, row_scale = packed.fetched(config.rows, config.channels), packed.scale
        if config.copy:
            _weigh_rows[(_programs(first, tiles, config), count)](
                row_side, key_side, row_scale, key_scale, weights, head, -(-shape.k_len // stride), *numbers,
                D=head_dim, WIDTH=width, STEP=config.channels, BAND=config.band, FP8=config.fp8, **options,
            )  # fmt: skip
        else:
            _weigh[(-(-k_blocks * each // config.keys), -(-tiles // config.rows), count)](
                given, paged.k, paged.block_table, weights, head, given.stride(0), given.stride(1), paged.head_stride,
                *numbers, KV_HEADS=kv.kv_heads, D=head_dim, D_PAD=pad(head_dim), PAGE=kv.block_size,
                PRECISION=precision(q.dtype), **options,
            )  # fmt: skip
        found.add(head, count, threshold, lagging, NO_BAR, window)
    return found


def _programs(first: int, tiles: int, config: Config) -> int:
    """Programs of ``_weigh_rows`` for one head: for each band of rows of tiles the tiles of keys up to its last row's,
    as the kernel counts them."""
    rows = config.band * config.rows
    bands = -(-tiles // rows)
    least = (first + rows - 1) // config.keys + 1
    return config.band * (bands * least + rows // config.keys * (bands * (bands - 1) // 2))


def _row_tiles(q: Tensor, shape: Shape, stride: int, config: Config) -> TensorDescriptor:
    """Queries [heads, stride, rows of tiles, head_dim] as they lie; a copy with zeros where tiles at the ends are cut,
    or for addresses that the copy engine does not take."""
    heads, q_len, head_dim = q.shape
    ahead = shape.q_start % stride
    tiles = -(-(ahead + q_len) // stride)
    if tiles * stride != q_len or any(at * q.element_size() % 16 for at in (q.storage_offset(), *q.stride()[:2])):
        given, q = q, q.new_zeros(heads, tiles * stride, head_dim)
        q[:, ahead : ahead + q_len] = given
    by_head, by_row, by_channel = q.stride()
    strides = [by_head, by_row, stride * by_row, by_channel]
    return TensorDescriptor(q, [heads, stride, tiles, head_dim], strides, [1, 1, config.rows, config.channels])


def _key_tiles(kv: KVView, shape: Shape, stride: int, config: Config) -> TensorDescriptor:
    """Keys [kv_heads * tiles, stride * head_dim], with zeros behind the last one."""
    paged, head_dim = kv.paged(), kv.head_dim
    keys = gather(paged.k, paged.block_table, 0, shape.k_len, kv.dtype)
    if shape.k_len % stride:
        keys = torch.nn.functional.pad(keys, (0, 0, 0, -shape.k_len % stride))
    return TensorDescriptor.from_tensor(keys.view(-1, stride * head_dim), [config.keys, config.channels])


@triton.jit(
    do_not_specialize=["head_from", "table_head", "q_start", "q_len", "k_len", "first", "tiles", "k_blocks"],
    do_not_specialize_on_alignment=["table"],
)
def _weigh(
    q_ptr, k_pool, table, weights, head_from, q_head, q_row, table_head, q_start, q_len, k_len, first, tiles, k_blocks,
    scale_log2, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    STRIDE: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Base-2 logarithm of what the tiles of each key block weigh in ``ROWS`` rows of tiles: a tile's logit is the mean
    of its antidiagonal, over the pairs that exist."""
    own = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # rows of tiles from the call's first on
    tile = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(0) * KEYS <= first + tl.minimum(tl.program_id(1) * ROWS + ROWS, tiles) - 1:
        head = head_from + tl.program_id(2)
        kv_head = head // GROUP
        table += kv_head.to(tl.int64) * table_head
        channel = tl.arange(0, D_PAD)
        begin = (first + own) * STRIDE - q_start  # of the call's rows
        summed = tl.zeros([ROWS, KEYS], tl.float32)
        for step in tl.range(0, STRIDE):
            row = begin + STRIDE - 1 - step
            inside = (row >= 0) & (row < q_len)
            q = tl.load(
                q_ptr + head.to(tl.int64) * q_head + row.to(tl.int64)[:, None] * q_row + channel[None, :],
                mask=inside[:, None] & (channel[None, :] < D),
                other=0.0,
            )
            key = tile * STRIDE + step
            there = key < k_len
            at = pool_rows(table, key, there, kv_head, KV_HEADS, PAGE)[:, None]
            k = load_keys(k_pool, at, channel[None, :], there[:, None], D, q.dtype)
            summed = tl.dot(q, tl.trans(k), summed, input_precision=PRECISION)
        _keep(
            summed, weights, tl.program_id(2), tl.program_id(1) * ROWS, tl.program_id(0) * KEYS, q_start, q_len, k_len,
            first, tiles, k_blocks, scale_log2, softcap, STRIDE, EACH, ROWS, KEYS, CAPPED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["head_from", "key_tiles", "q_start", "q_len", "k_len", "first", "tiles", "k_blocks"])
def _weigh_rows(
    q_rows, k_rows, q_scale, k_scale, weights, head_from, key_tiles, q_start, q_len, k_len, first, tiles, k_blocks,
    scale_log2, softcap,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr, BAND: tl.constexpr, FP8: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """As :func:`_weigh`, over what lies in one piece, in one loop over the channels of all steps. Of a band of rows of
    tiles all programs come together, neighbours with the same keys: what they read fits the second-level cache. In FP8
    queries are ``fp8_tiles.pack_queries``' of the call's heads, and each tile has its scale."""
    wide = (first + BAND * ROWS - 1) // KEYS + 1  # tiles of keys that the band's last row sees
    rest = tl.program_id(0)
    band = rest * 0
    while rest >= BAND * wide:
        rest -= BAND * wide
        band += 1
        wide += BAND * ROWS // KEYS
    row, key = (band * BAND + rest % BAND) * ROWS, rest // BAND * KEYS
    if (row < tiles) & (key <= first + tl.minimum(row + ROWS, tiles) - 1):
        head = head_from + tl.program_id(1)
        line = (head // GROUP) * key_tiles + key
        summed = tl.zeros([ROWS, KEYS], tl.float32)
        own = tl.program_id(1) * tiles + row
        for at in tl.range(0, WIDTH, STEP):
            if FP8:
                q = q_rows.load([own, at])
            else:
                q = tl.reshape(q_rows.load([head, STRIDE - 1 - at // D, row, at % D]), (ROWS, STEP))
            summed = tl.dot(q, tl.trans(k_rows.load([line, at])), summed)
        each = scale_log2
        if FP8:
            place = tl.arange(0, KEYS)
            summed *= tl.load(k_scale + line + place, mask=key + place < key_tiles, other=0.0)[None, :]
            place = tl.arange(0, ROWS)
            each = scale_log2 * tl.load(q_scale + own + place, mask=row + place < tiles, other=0.0)[:, None]
        _keep(
            summed, weights, tl.program_id(1), row, key, q_start, q_len, k_len, first, tiles, k_blocks, each, softcap,
            STRIDE, EACH, ROWS, KEYS, CAPPED,
        )  # fmt: skip


@triton.jit
def _keep(
    summed, weights, line, row, key, q_start, q_len, k_len, first, tiles, k_blocks, scale_log2, softcap,
    STRIDE: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Store what ``summed`` [rows of tiles from ``row`` on, tiles of keys from ``key`` on] weighs in head ``line``,
    block by block; ``scale_log2``: of all, or [rows of tiles, 1]."""
    own, tile = row + tl.arange(0, ROWS), key + tl.arange(0, KEYS)
    begin = (first + own) * STRIDE - q_start
    from_row = (first + row) * STRIDE - q_start
    if (from_row >= 0) & (from_row + ROWS * STRIDE <= q_len) & (key + KEYS <= first + row + 1):
        logits = cap_logits(summed, scale_log2 / STRIDE, softcap, CAPPED)  # all pairs exist and are causal
        logits = tl.reshape(logits, (ROWS, KEYS // EACH, EACH))
        high = tl.max(logits, 2)
        found = high + tl.log2(tl.sum(tl.exp2(logits - high[:, :, None]), 2))
        _store(found, weights, line, own, tile, tiles, k_blocks, EACH, KEYS)
    else:
        # Steps at which the row exists are those from STRIDE - its rows' end on; keys exist from step 0 on.
        from_step = tl.maximum(begin + STRIDE - q_len, 0)
        to_step = tl.minimum(begin + STRIDE, STRIDE)
        pairs = tl.minimum(to_step[:, None], (k_len - tile * STRIDE)[None, :]) - from_step[:, None]
        logits = cap_logits(summed / tl.maximum(pairs, 1).to(tl.float32), scale_log2, softcap, CAPPED)
        known = (pairs > 0) & (tile[None, :] <= (first + own)[:, None]) & (own < tiles)[:, None]
        logits = tl.reshape(tl.where(known, logits, float("-inf")), (ROWS, KEYS // EACH, EACH))
        high = tl.max(logits, 2)
        anchor = tl.where(high == float("-inf"), 0.0, high)
        total = tl.sum(tl.exp2(logits - anchor[:, :, None]), 2)
        found = tl.where(high == float("-inf"), float("-inf"), anchor + tl.log2(tl.maximum(total, 1e-37)))
        _store(found, weights, line, own, tile, tiles, k_blocks, EACH, KEYS)


@triton.jit
def _store(found, weights, line, own, tile, tiles, k_blocks, EACH: tl.constexpr, KEYS: tl.constexpr):
    block = tl.min(tile, 0) // EACH + tl.arange(0, KEYS // EACH)
    at = (line.to(tl.int64) * k_blocks + block)[None, :] * tiles + own[:, None]
    tl.store(weights + at, found, mask=(own < tiles)[:, None] & (block < k_blocks)[None, :])
