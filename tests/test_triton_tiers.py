"""The kernels of the host tier under Triton's interpreter: blocks between two memories."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from tier_helpers import nothing_left

from saccade.errors import SaccadeError
from saccade.kv import BlockManager, KVFormat, KVStorage, SequenceKV, offers
from saccade.kv.host import HostTier
from saccade.ops.triton import pages, residency
from saccade.ops.triton.batch import KeyLists, Pages
from saccade.ops.triton.decode import attend_decode


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "parts"), [((1, 16, 16), 2), ((3, 32, 48), 2), ((8, 32, 128), 2), ((1, 32, 72), 1)])
def test_blocks_are_copied_whole_and_none_beside_them(dtype, shape, parts):
    source, target = (tuple(torch.randn(count, *shape).to(dtype) for _ in range(parts)) for count in (9, 7))
    want = [part.clone() for part in target]
    which, where = torch.tensor([8, 1, 4]), torch.tensor([0, 6, 2])
    pages.copy_blocks(source, which, target, where)
    for ours, expected, got in zip(source, want, target):
        expected[where] = ours[which]
        assert torch.equal(got, expected)
    pages.copy_blocks(source, which[:0], target, where[:0])
    which = torch.tensor([3, -1, 5, 7])  # the second is passed over, the last is not counted
    pages.launch_copies(source, which, target, torch.tensor([5, 5, 1, 3]), torch.tensor([3]), 4)
    for ours, expected, got in zip(source, want, target):
        expected[[5, 1]] = ours[[3, 5]]
        assert torch.equal(got, expected)


def test_blocks_whose_values_are_channels_of_their_keys_are_copied_once():
    source, target = torch.randn(9, 1, 16, 48), torch.randn(7, 1, 16, 48)
    want, which, where = target.clone(), torch.tensor([8, 1, 4]), torch.tensor([0, 6, 2])
    want[where] = source[which]
    pages.copy_blocks((source,), which, (target,), where)
    assert torch.equal(target, want)


@pytest.mark.parametrize("apart", [False, True])
def test_a_sequence_over_two_memories_by_kernels(apart):
    form = KVFormat(torch.float32, 2, 16, 16)
    storage = KVStorage(form, 11, "cpu", pages)
    pool = BlockManager(storage, 2, heads_apart=apart, tier=HostTier(1 << 18, storage, apart), debug=True)
    kv, rows = SequenceKV(pool), torch.randn(2, 2, 2, 150, 16)
    for start, stop in ((0, 70), (70, 71), (71, 150)):
        kv.reserve(stop)
        for layer, (k, v) in enumerate(rows):
            kv.append(layer, k[:, start:stop], v[:, start:stop])
    for layer, (k, v) in enumerate(rows):
        view = kv.view(layer)
        assert torch.equal(view.keys(3, 149), k[:, 3:149])
        assert torch.equal(view.values(), v)
        some = torch.tensor([149, 0, 77])
        assert torch.equal(view.take(some, 1)[1], v[1, some])
    assert pool.tiers.counts.misses > 20
    kv.free()
    nothing_left(pool)


@pytest.mark.parametrize("replacement", ["clock", "lru", "fifo"])
def test_what_layers_read_comes_by_itself_and_the_host_knows(replacement):
    form = KVFormat(torch.float32, 2, 16, 16)
    storage = KVStorage(form, 41, "cpu")
    pool = BlockManager(storage, 2, tier=HostTier(1 << 20, storage), debug=True, replacement=replacement)
    kv, rows = SequenceKV(pool), torch.randn(2, 2, 2, 700, 16)
    for start in range(0, 700, 100):
        kv.reserve(start + 100)
        for layer, (k, v) in enumerate(rows):
            kv.append(layer, k[:, start : start + 100], v[:, start : start + 100])
    tiers, offers = pool.tiers, pool.tiers.offer()
    tables, length = torch.zeros(2, 1, 1, 64, dtype=torch.int32), torch.tensor([700], dtype=torch.int32)
    tail, rng = kv.block_table[-1:].numpy(), np.random.default_rng(0)
    for layer in range(2):
        with tiers.fetch(layer, tail):
            pass
    for step in range(14):
        flight = offers.prepare(tail, tail)
        offers.begin()
        right = True
        for layer, (k, _) in enumerate(rows):
            picked = np.sort(rng.choice(42, 3 if step < 12 else 20, replace=False))
            listed = torch.tensor(np.append(picked, [99] * 3)[None]).int()
            lists = KeyLists(None, torch.tensor([len(picked)]), listed, 1, 16, listed.shape[1])
            where = Pages(storage.k, storage.v, tables[layer], length, 700)
            residency.bring_in(pool, offers, layer, kv.block_table[None].int(), where, lists)
            for slot, block in zip(tables[layer, 0, 0, picked].tolist(), picked):
                right &= torch.equal(storage.k[slot], k[:, block * 16 : block * 16 + 16])
        came = offers.settle(flight)
        assert came == (step < 12)  # far more than is listed at once cannot come
        assert right or not came
        slots = pool.map_flat()
        taken = slots[slots >= 0].tolist()
        assert len(set(taken)) == len(taken) == 40 - pool.free_slots
        assert tiers.guard not in taken
        assert pool.absent == (slots.reshape(2, -1)[:, kv.block_table] < 0).sum()
    assert min(tiers.counts.hits, tiers.counts.misses, tiers.counts.evicted) > 20
    for layer, (k, v) in enumerate(rows):
        assert torch.equal(kv.view(layer).keys(), k)
        assert torch.equal(kv.view(layer).values(), v)
    block = next(at for at, one in enumerate(kv.block_table.tolist()) if not pool.resident(0, one))
    cell = tiers._cell[0, kv.block_table[block]] - 1
    tiers.tier._owner[cell, 2] += 1  # as if it were of a later holder
    flight = offers.prepare(tail, tail)
    lists = KeyLists(None, torch.tensor([1]), torch.tensor([[block]]).int(), 1, 16, 1)
    where = Pages(storage.k, storage.v, tables[0], length, 700)
    residency.bring_in(pool, offers, 0, kv.block_table[None].int(), where, lists)
    with pytest.raises(SaccadeError, match="other blocks"):
        offers.settle(flight)


@pytest.mark.parametrize("replacement", ["clock", "fifo"])
def test_blocks_come_for_the_heads_that_read_them(replacement):
    """Lists of single KV heads and of query heads, and a list for all: each head's blocks are right where it reads, and
    what it does not read did not move."""
    form = KVFormat(torch.float32, 2, 16, 16)
    storage = KVStorage(form, 41, "cpu")
    tier = HostTier(1 << 20, storage, heads_apart=True)
    pool = BlockManager(storage, 2, heads_apart=True, tier=tier, debug=True, replacement=replacement)
    kv, rows = SequenceKV(pool), torch.randn(2, 2, 2, 700, 16)
    for start in range(0, 700, 100):
        kv.reserve(start + 100)
        for layer, (k, v) in enumerate(rows):
            kv.append(layer, k[:, start : start + 100], v[:, start : start + 100])
    tiers, offers = pool.tiers, pool.tiers.offer()
    ids, length = kv.block_table.numpy(), torch.tensor([700], dtype=torch.int32)
    tables, tail, rng = torch.zeros(2, 1, 2, 64, dtype=torch.int32), ids[-1:], np.random.default_rng(0)
    for layer in range(2):
        with tiers.fetch(layer, tail):
            pass
    for step in range(16):
        units = (2, 4, 1)[step % 3]
        flight = offers.prepare(tail, tail)
        offers.begin()
        right, before, wanted = True, tiers.counts.copy(), 0
        for layer, (k, v) in enumerate(rows):
            some = 20 if step >= 14 else 1 if units == 4 else 2
            picked = [np.sort(rng.choice(42, some, replace=False)) for _ in range(units)]
            reads = [np.unique(np.concatenate(own)) for own in (picked[: -(-units // 2)], picked[units // 2 :])]
            wanted += sum(int((pool.map_of(head)[layer, ids[own]] < 0).sum()) for head, own in enumerate(reads))
            listed = torch.tensor(np.stack([np.append(own, [99] * 3) for own in picked])).int()
            counts = torch.tensor([len(own) for own in picked])
            lists = KeyLists(None, counts, listed, units, 16, listed.shape[1])
            where = Pages(storage.k, storage.v, tables[layer], length, 700)
            residency.bring_in(pool, offers, layer, kv.block_table[None].int(), where, lists)
            for head, own in enumerate(reads):
                for slot, block in zip(tables[layer, 0, head, own].tolist(), own):
                    for pages_of, made in ((storage.k, k), (storage.v, v)):
                        rest = made[head, block * 16 : block * 16 + 16]
                        right &= torch.equal(pages_of[slot, head, : len(rest)], rest)
        came = offers.settle(flight)
        assert came == (step < 14)
        if came:
            moved = tiers.counts.since(before)
            assert right
            assert moved.misses == wanted or replacement == "fifo"  # a layer may drive out what the next one reads
            assert moved.bytes_read == moved.misses * form.block_bytes // 2
        for head in range(2):
            slots = pool.map_of(head)
            taken = slots[slots >= 0].tolist()
            assert len(set(taken)) == len(taken) == 40 - pool.free_in(head)
            assert tiers.guard not in taken
        assert pool.absent == sum(int((pool.map_of(head)[:, ids] < 0).sum()) for head in range(2))
    assert len({pool.resident(0, block, 0) == pool.resident(0, block, 1) for block in ids.tolist()}) == 2
    for layer, (k, v) in enumerate(rows):
        assert torch.equal(kv.view(layer).keys(), k)
        assert torch.equal(kv.view(layer).values(), v)
    kv.free()
    nothing_left(pool)


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_absent_is_read_where_it_lies(apart, monkeypatch):
    """Attention over lists is to the last bit that over plain keys, whatever lies where; what then comes is right, and
    no more of it than there is room for."""
    monkeypatch.setattr(offers, "READS_HOST", True)
    monkeypatch.setattr(offers, "MOST_LATE", 2)
    form = KVFormat(torch.float32, 2, 16, 16)
    storage = KVStorage(form, 41, "cpu")
    tier = HostTier(1 << 20, storage, heads_apart=apart)
    pool = BlockManager(storage, 2, heads_apart=apart, tier=tier, debug=True)
    kv, rows = SequenceKV(pool), torch.randn(2, 2, 2, 700, 16)
    for start in range(0, 700, 100):
        kv.reserve(start + 100)
        for layer, (k, v) in enumerate(rows):
            kv.append(layer, k[:, start : start + 100], v[:, start : start + 100])
    tiers, rng, tail = pool.tiers, np.random.default_rng(0), kv.block_table[-1:].numpy()
    given, logical, length = tiers.offer(), kv.block_table[None].int(), torch.tensor([700], dtype=torch.int32)
    tables = torch.zeros(2, 1, pool.rows, 64, dtype=torch.int32)
    for layer in range(2):
        with tiers.fetch(layer, tail):
            pass
    for _ in range(8):
        flight = given.prepare(tail, tail)
        given.begin()
        before = tiers.counts.copy()
        for layer, (k, v) in enumerate(rows):
            picked = np.stack([np.sort(rng.choice(43, 9, replace=False)) for _ in range(2)])
            lists = KeyLists(None, torch.tensor([9, 9]), torch.from_numpy(picked).int(), 2, 16, 9)
            pages = Pages(storage.k, storage.v, tables[layer], length, 700)
            found, q = residency.find(pool, given, layer, logical, pages), torch.randn(1, 4, 16)
            got = attend_decode(q, found, lists, scale=0.25)
            plain = torch.zeros(2, 44, 2, 16, 16)
            for part, own in zip(plain, (k, v)):
                part.view(44, 2, 256)[:43] = own[:, :688].reshape(2, 43, 256).transpose(0, 1)
                part[43, :, :12] = own[:, 688:]
            whole = Pages(*plain, torch.arange(44, dtype=torch.int32)[None, None], length, 700)
            for one, want in zip(got, attend_decode(q, whole, lists, scale=0.25)):
                assert torch.equal(one, want)
            residency.bring_later(pool, given, layer, [(logical, found, lists)])
            assert given.late_count[layer].max() <= 2
        assert given.settle(flight)
        moved = tiers.counts.since(before)
        assert moved.bytes_read % (form.block_bytes // 2) == 0
        assert moved.misses > 0
        given.catch_up()
        for layer, (k, _) in enumerate(rows):
            for head in range(2):
                slots = pool.map_of(head if apart else 0)[layer, kv.block_table.numpy()]
                for block in np.nonzero(slots >= 0)[0]:
                    own = k[head, block * 16 : block * 16 + 16]
                    assert torch.equal(storage.k[slots[block], head, : len(own)], own)
    assert tiers.counts.hits > 10
    kv.free()
    nothing_left(pool)
