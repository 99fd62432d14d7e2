"""Which packed rows of a step belong to which sequence, and where its keys lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.kv.format import BLOCK_SIZES, KVFormat
from saccade.kv.paged import Paged
from saccade.kv.rows import RowMover
from saccade.kv.view import KVView


@dataclass(frozen=True, eq=False)
class Rows:
    """The packed rows ``first .. stop - 1`` of a step, the last of one sequence's ``length`` keys. ``table``: int32 [1,
    >= blocks], slots of its blocks as :func:`view` counts them. ``prefill``: they are rows of a prompt."""

    first: int
    stop: int
    length: int
    table: Tensor
    prefill: bool


def slots(block_table: Tensor) -> Tensor:
    """vLLM's int32 [sequences, blocks] as slots: keys and values of a block lie beside each other there, so every
    block takes two."""
    return block_table * 2


def split(
    starts: Sequence[int], lengths: Sequence[int], prefilling: Sequence[bool], least: int
) -> tuple[list[int], list[int]]:
    """The sequences whose rows a method chooses for, and the others, by number. ``starts``: of each one's packed rows,
    and the end; ``lengths``: of its keys with those of this step. Sequences without rows are neither."""
    chosen: list[int] = []
    others: list[int] = []
    for number, (length, prefills) in enumerate(zip(lengths, prefilling)):
        rows = starts[number + 1] - starts[number]
        if rows:
            (chosen if prefills and rows > 1 and length >= least else others).append(number)
    return chosen, others


def packed(starts: Sequence[int], numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """The packed rows of sequences ``numbers``: a slice, which copies nothing, where they follow one another."""
    first, stop = starts[numbers[0]], starts[numbers[-1] + 1]
    if sum(starts[one + 1] - starts[one] for one in numbers) == stop - first:
        return slice(first, stop)
    parts = [torch.arange(starts[one], starts[one + 1]) for one in numbers]
    return torch.cat(parts).to(device, non_blocking=True)


def view(pages: Tensor, table: Tensor, length: int, mover: RowMover) -> KVView:
    """The keys and values of one sequence. ``pages`` [blocks, 2, kv_heads, block_size, head_dim], vLLM's cache of a
    layer, contiguous: seen as slots one block's keys lie in 2 i and its values in 2 i + 1, which are slot 2 i of the
    same memory seen from one slot further on. Nothing is copied. ValueError for a cache that lies otherwise."""
    blocks, two, kv_heads, block_size, head_dim = pages.shape
    if two != 2 or not pages.is_contiguous() or block_size not in BLOCK_SIZES:
        raise ValueError(
            "saccade reads a KV cache [blocks, 2, kv_heads, block_size, head_dim] that is contiguous, with a "
            f"block_size of {', '.join(map(str, BLOCK_SIZES))}; got {tuple(pages.shape)} with strides {pages.stride()}"
        )
    flat = pages.view(2 * blocks, kv_heads, block_size, head_dim)
    own = KVFormat(pages.dtype, kv_heads, head_dim, block_size)
    return KVView(Paged(flat[:-1], flat[1:], table, length, own), mover=mover)
