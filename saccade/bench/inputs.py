"""Synthetic attention inputs: structured enough that selection has something to find."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.kv import BlockManager, KVFormat, KVStorage, KVView, SequenceKV
from saccade.kv.row_formats import AUTO, RowFormat
from saccade.ops.movers import row_mover
from saccade.selection import Blocks, Shape

LARGE_BYTES = 1 << 30  # of one copy of the KV
COLD_BYTES = 1 << 28  # copies of the KV together exceed any last-level cache


@dataclass(frozen=True)
class Problem:
    """One attention call, with ``views`` holding copies of the same KV so that repeated calls do not find it cached."""

    q: Tensor  # [heads, q_len, head_dim]
    k: Tensor  # [kv_heads, context, head_dim]
    v: Tensor
    views: list[KVView]
    shape: Shape
    sequence: SequenceKV  # a layer for each copy

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[-1])


def make(
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    q_len: int,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
) -> Problem:
    """Keys with attention sinks, a few heavy columns, heavy distances and locality, as trained models show; queries of
    a group differ. The last ``q_len`` positions are the query rows."""
    with torch.device(device):
        return _make(heads, kv_heads, head_dim, context, q_len, dtype, torch.Generator(device).manual_seed(seed))


def _make(
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    q_len: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Problem:
    half = head_dim // 2
    position = torch.arange(context)[:, None]
    # Sinusoids of the position in the first half of the channels: a dot product of two rows depends on their distance.
    frequency = 10_000.0 ** (-torch.arange(0, half, 2) / half)
    phase = position * frequency
    place = torch.cat([phase.cos(), phase.sin()], 1)[:, :half] * math.sqrt(12 / math.sqrt(half))
    common = torch.randn(head_dim - half, generator=generator)
    common *= math.sqrt(head_dim) / common.norm()
    k = torch.randn(kv_heads, context, head_dim, generator=generator)
    k[..., :half] = 0.3 * k[..., :half] + place
    columns = torch.randperm(context, generator=generator)[: max(2, context // 4096)]
    k[:, columns, half:] += common
    k[:, :4, half:] += 1.3 * common
    q = 0.5 * torch.randn(heads, q_len, head_dim, generator=generator)
    q[..., :half] += place[-q_len:]
    q[..., half:] += common
    v = torch.randn(kv_heads, context, head_dim, generator=generator)
    k, v, q = k.to(dtype), v.to(dtype), q.to(dtype)
    size = 2 * k.numel() * k.element_size()
    # Sparse reads leave most of a copy untouched: even of a large one there are several.
    copies = max(4 if size <= LARGE_BYTES else 1, min(16, COLD_BYTES // size)) if q_len == 1 else 1
    return problem_of(q, k, v, copies)


def problem_of(q: Tensor, k: Tensor, v: Tensor, copies: int = 1, rows: RowFormat = AUTO) -> Problem:
    """``q`` [heads, q_len, head_dim] as the last rows over ``copies`` copies of ``k`` and ``v`` [kv_heads, context,
    head_dim], stored as ``rows``."""
    kv_heads, context, head_dim = k.shape
    layout = KVFormat(k.dtype, kv_heads, head_dim, k=rows, v=rows)
    storage = KVStorage(layout, copies * layout.blocks(context), k.device, row_mover(k.device))
    sequence = SequenceKV(BlockManager(storage, copies))
    sequence.reserve(context)
    for copy in range(copies):
        sequence.append(copy, k, v)
    shape = Shape.suffix(q.shape[0], kv_heads, q.shape[1], context, q.device)
    return Problem(q, k, v, [sequence.view(copy) for copy in range(copies)], shape, sequence)


def random_blocks(shape: Shape, block_size: int, density: float, units: int, seed: int = 0) -> Blocks:
    """Random block lists that hold about ``density`` of every query block's keys, always the first and the diagonal."""
    generator = torch.Generator().manual_seed(seed)
    k_blocks = -(-shape.k_len // block_size)
    first = shape.q_start // block_size
    q_blocks = (shape.q_start + shape.q_len - 1) // block_size - first + 1
    visible = first + torch.arange(q_blocks) + 1
    # Half-blocks: the diagonal block holds half the pairs of a full one where many rows share it.
    wanted = (density * visible).round().clamp(min=1)
    noise = torch.rand(units, q_blocks, k_blocks, generator=generator)
    index = torch.arange(k_blocks)
    noise.masked_fill_(index[None, :] >= visible[:, None], 2.0)
    noise[:, torch.arange(q_blocks), visible - 1] = -1.0
    noise[:, :, 0] = torch.where(wanted > 1, -0.5, noise[:, :, 0])
    rank = noise.argsort(-1).argsort(-1)
    return Blocks.from_block_mask(shape, block_size, rank < wanted[None, :, None])
