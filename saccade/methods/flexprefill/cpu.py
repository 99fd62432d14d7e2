"""FlexPrefill's blocks by the C++ kernels: every head in one call, as plain torch chooses them head after head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from saccade.methods.base import Chunk
from saccade.ops import cpu
from saccade.ops.cpu_structs import Reads, address, native
from saccade.ops.scores import mean_keys
from saccade.selection import Blocks

if TYPE_CHECKING:
    from saccade.methods.flexprefill.method import FlexPrefill


def select_blocks(method: FlexPrefill, chunk: Chunk) -> Blocks:
    """Block lists of every query head for ``lines="block"`` and a chunk that :func:`saccade.ops.cpu.serves` allows.

    Weights are summed in another order than by torch, so that lists may differ where a sum and its threshold are as
    close as a few parts in a million.
    """
    shape, size = chunk.shape, method.block_size
    rows = min(size, shape.q_len)
    pooled = mean_keys(chunk.kv, size).contiguous()
    k_blocks = pooled.shape[1]
    q_blocks = (shape.q_start + shape.q_len - 1) // size - shape.q_start // size + 1
    lists, words = shape.heads * q_blocks, -(-k_blocks // 64)
    least, most = method.budget_blocks
    aware = torch.empty(shape.heads, dtype=torch.bool, device="cpu")
    marks = torch.empty(lists, words, dtype=torch.int64, device="cpu")
    offsets = torch.empty(lists + 1, dtype=torch.int64, device="cpu")
    choice = native.FlexChoice(
        pooled=address(pooled),
        rows=rows,
        block_size=size,
        k_blocks=k_blocks,
        q_blocks=q_blocks,
        known=method.known_blocks(shape),
        least=least,
        most=k_blocks if most is None else most,
        words=words,
        gamma=method.gamma,
        tau=method.tau,
        flatten=method.flatten,
        aware=address(aware),
        marks=address(marks),
        offsets=address(offsets),
    )
    call = Reads(chunk.q, chunk.kv, shape, chunk.scale, chunk.softcap, None)
    cpu.kernels().flex_choice(call.threads, call.pool, call.table, call.queries(0, shape.q_len), choice)
    indices = torch.empty(int(offsets[-1]), dtype=torch.int32, device="cpu")
    native.list_marks(
        native.MarkLists(
            threads=call.threads,
            lists=lists,
            words=words,
            marks=address(marks),
            offsets=address(offsets),
            indices=address(indices),
        )
    )
    chunk.cost.scored += rows * shape.k_len
    chunk.cost.estimated += round(int(aware.sum()) * q_blocks * k_blocks / shape.heads)
    return Blocks(shape, size, offsets, indices)
