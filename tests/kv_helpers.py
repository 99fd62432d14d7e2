"""KV for tests: memory that nobody wrote holds NaN, so that whoever reads it is seen; and heads with slots of their
own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.kv import BlockManager, KVFormat, KVStorage, KVView, Paged, SequenceKV


class PoisonedStorage(KVStorage):
    """Storage whose slots hold NaN until they are written to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for part in (self.k, self.v):
            part.view(torch.uint8).fill_(255)  # of every float, and of a float that codes are multiples of


def poisoned_pool(
    blocks: int,
    kv_heads: int,
    head_dim: int,
    *,
    layers: int = 1,
    block_size: int = 32,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> BlockManager:
    """A pool of ``blocks`` poisoned slots; of heads apart, each has its blocks elsewhere."""
    storage = PoisonedStorage(KVFormat(dtype, kv_heads, head_dim, block_size), blocks)
    pool = BlockManager(storage, layers, **options)
    scatter(pool)
    return pool


def scatter(pool: BlockManager) -> None:
    """Let KV heads that lie apart take their slots in orders of their own."""
    for head, free in enumerate(pool._free_slots[1:]):
        random.Random(head).shuffle(free)


def view_with_heads_apart(k: Tensor, v: Tensor, block_size: int = 32, shuffle_seed: int | None = 0) -> KVView:
    """``k``, ``v`` [kv_heads, n, head_dim] paged so that no KV head has a block where another one has it."""
    kv_heads, length, head_dim = k.shape
    own = KVFormat(k.dtype, kv_heads, head_dim, block_size)
    blocks = own.blocks(length)
    storage = PoisonedStorage(own, blocks * kv_heads + 3, k.device)
    order = torch.randperm(storage.num_blocks, generator=torch.Generator().manual_seed(shuffle_seed or 0), device="cpu")
    table = order[: blocks * kv_heads].view(kv_heads, blocks).to(k.device, torch.int32)
    view = KVView(Paged(storage.k, storage.v, table, length, own))
    view.write(0, k, v)
    return view


def check_blocks(pool: BlockManager, sequences: Sequence[SequenceKV]) -> None:
    """No block lost, none double: references are the sequences' own, in every layer a slot belongs to one block or is
    free, and tables say what the map says."""
    held = Counter(block for kv in sequences for block in kv.block_table.tolist())
    assert [pool.references(block) for block in range(pool.logical_blocks)] == [
        held[block] for block in range(pool.logical_blocks)
    ]
    assert sorted([*held, *pool._free]) == list(range(pool.logical_blocks))
    assert torch.equal(pool.slots.cpu(), pool.host_slots)
    for row in range(pool.rows):
        taken = [slot for slot in pool.host_slots[:, row].flatten().tolist() if slot >= 0]
        assert sorted([*taken, *pool._free_slots[row]]) == list(range(pool.num_blocks))
    resident = {block for block in range(pool.logical_blocks) if (pool.host_slots[:, :, block] >= 0).any()}
    assert resident <= set(held)
    for kv in sequences:
        blocks = kv.block_table.tolist()
        assert torch.equal(kv.tables[:, :, : len(blocks)].cpu(), pool.host_slots[:, :, blocks])


def move_blocks(pool: BlockManager, kv: SequenceKV) -> None:
    """Give every part of ``kv``'s blocks another slot, with its content. The sequence is told nothing."""
    blocks = kv.block_table.tolist()
    for layer in range(pool.layers):
        for row in range(pool.rows):
            heads = slice(None) if pool.rows == 1 else slice(row, row + 1)
            head = None if pool.rows == 1 else row
            before = torch.from_numpy(pool.lookup(blocks)[layer, row]).long().to(pool.storage.device)
            content = [pages[before, heads].clone() for pages in (pool.storage.k, pool.storage.v)]
            pool.evict(layer, blocks, head)
            for pages in (pool.storage.k, pool.storage.v):
                pages[before, heads] = float("nan")
            pool._free_slots[row].reverse()  # those just freed come back last
            pool.admit(layer, blocks, head)
            after = torch.from_numpy(pool.lookup(blocks)[layer, row]).long().to(pool.storage.device)
            assert not torch.equal(before, after)
            for pages, rows in zip((pool.storage.k, pool.storage.v), content):
                pages[after, heads] = rows
