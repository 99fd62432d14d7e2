"""Logical blocks: reference counts, owners, the map of slots, and the formats of step data."""

from __future__ import annotations

import random

import pytest
import torch
from kv_helpers import check_blocks, poisoned_pool

from saccade.errors import CapacityError, SaccadeError
from saccade.kv import KVView, SequenceKV
from saccade.kv.saved import save_kv

G, D, LAYERS, SIZE = 2, 16, 3, 16


def pool_of(slots: int, **options):
    return poisoned_pool(slots, G, D, layers=LAYERS, block_size=SIZE, **options)


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [LAYERS, G, count, D]."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, G, count, D, generator=rng), torch.randn(LAYERS, G, count, D, generator=rng)


def append(kv: SequenceKV, k: torch.Tensor, v: torch.Tensor) -> None:
    kv.reserve(kv.length + k.shape[2])
    for layer in range(LAYERS):
        kv.append(layer, k[layer], v[layer])


def test_a_block_is_held_by_whom_it_was_given_to():
    pool = pool_of(12)
    a, b = pool.new_owner(), pool.new_owner()
    blocks = pool.allocate(2, a)
    assert [pool.owner(block) for block in blocks] == [a, a]
    assert (pool.used_blocks, pool.free_blocks, pool.free_logical) == (6, 6, 2)
    pool.share(blocks[:1], b)
    assert [pool.references(block) for block in blocks] == [2, 1]
    assert pool.owner(blocks[0]) == a
    pool.release(blocks[:1], a)
    assert pool.owner(blocks[0]) == b
    assert pool.used_blocks == 6
    pool.release(blocks[:1], b)
    assert pool.owner(blocks[0]) is None
    assert pool.used_blocks == 3
    assert (pool.slots[:, :, blocks[0]] == -1).all()


def test_misuse_is_an_error_that_changes_nothing():
    pool = pool_of(12)
    a, b = pool.new_owner(), pool.new_owner()
    first, second = pool.allocate(2, a)
    with pytest.raises(SaccadeError, match=f"sequence {b} releases KV block {first}, .* held by sequence {a}"):
        pool.release([first], b)
    with pytest.raises(SaccadeError, match="which it does not hold"):
        pool.release([second, first, second], a)  # one of them twice
    assert [pool.references(block) for block in (first, second)] == [1, 1]
    with pytest.raises(SaccadeError, match="each sequence holds a block once"):
        pool.share([first], a)
    pool.release([first, second], a)
    with pytest.raises(SaccadeError, match="which it does not hold: it is free"):
        pool.release([first], a)
    with pytest.raises(SaccadeError, match="it is free"):
        pool.share([first], b)
    assert pool.allocate(0, a) == []
    with pytest.raises(CapacityError, match="15 KV blocks wanted but 12 of 12 are free"):
        pool.allocate(5, a)
    assert (pool.free_blocks, pool.free_logical) == (12, 4)
    with pytest.raises(SaccadeError, match="cut to -1 tokens"):
        SequenceKV(pool).truncate(-1)
    with pytest.raises(CapacityError, match="3 logical KV blocks wanted but 2 of 2 are free"):
        pool_of(12, logical_blocks=2).allocate(3, a)
    with pytest.raises(SaccadeError, match="logical_blocks=0"):
        pool_of(12, logical_blocks=0)


@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_thousands_of_operations_against_plain_counts(seed, heads_apart):
    """Any order of allocate, share, release, evict and admit: holders are those of a plain dictionary of sets."""
    rng, pool = random.Random(seed), pool_of(30, heads_apart=heads_apart, logical_blocks=14)
    address, owners = pool.slots.data_ptr(), [pool.new_owner() for _ in range(4)]
    holders: dict[int, set[int]] = {}
    gone: set[tuple[int, int, int]] = set()  # layer, row, block
    for _ in range(3000):
        owner, layer = rng.choice(owners), rng.randrange(LAYERS)
        mine = [block for block, who in holders.items() if owner in who]
        action = rng.choice(["allocate", "share", "release", "release", "evict", "admit", "wrong"])
        if action == "allocate":
            count = rng.randint(1, 4)
            if count * LAYERS > pool.free_blocks or count > 14 - len(holders):
                with pytest.raises(CapacityError):
                    pool.allocate(count, owner)
                continue
            for block in pool.allocate(count, owner):
                assert block not in holders
                holders[block] = {owner}
        elif action == "share":
            others = [block for block in holders if block not in mine]
            for block in (chosen := rng.sample(others, min(len(others), 2))):
                holders[block].add(owner)
            pool.share(chosen, owner)
        elif action == "release":
            pool.release(chosen := rng.sample(mine, min(len(mine), 3)), owner)
            for block in chosen:
                holders[block].discard(owner)
                if not holders[block]:
                    del holders[block]
                    gone = {part for part in gone if part[2] != block}
        elif action in ("evict", "admit"):
            head = rng.randrange(G) if heads_apart and rng.random() < 0.7 else None
            rows = range(pool.rows) if head is None else [head]
            parts = {block: {(layer, row, block) for row in rows} for block in holders}
            if action == "evict":
                chosen = [block for block in parts if not parts[block] & gone][:2]
                pool.evict(layer, chosen, head)
                gone |= {part for block in chosen for part in parts[block]}
            else:
                chosen = [block for block in parts if parts[block] <= gone][:2]
                if len(chosen) > min(len(pool._free_slots[row]) for row in rows):
                    with pytest.raises(CapacityError):
                        pool.admit(layer, chosen, head)
                    continue
                pool.admit(layer, chosen, head)
                gone -= {part for block in chosen for part in parts[block]}
        else:
            wrong = rng.choice([block for block in range(14) if block not in mine] or [None])
            if wrong is not None:
                with pytest.raises(SaccadeError):
                    pool.release([*mine[:1], wrong], owner)
        assert [pool.references(block) for block in range(14)] == [len(holders.get(block, ())) for block in range(14)]
        there = {part for part in ((layer, row, block) for block in holders for layer in range(LAYERS) for row in
                                   range(pool.rows)) if part not in gone}  # fmt: skip
        assert {tuple(part) for part in (pool.slots >= 0).nonzero().tolist()} == there
        for row in range(pool.rows):
            taken = pool.slots[:, row][pool.slots[:, row] >= 0].tolist()
            assert sorted([*taken, *pool._free_slots[row]]) == list(range(30))
    assert pool.slots.data_ptr() == address
    for owner in owners:
        pool.release([block for block, who in holders.items() if owner in who], owner)
    assert (pool.used_blocks, pool.free_logical) == (0, 14)


@pytest.mark.parametrize("heads_apart", [False, True])
def test_a_block_that_leaves_and_comes_back_is_found_again(heads_apart):
    """Views follow the map: content written to a block's new slots is read, in one layer, and by one head."""
    pool = pool_of(24, heads_apart=heads_apart)
    kv, (k, v) = SequenceKV(pool), draw(50, 1)
    append(kv, k, v)
    block, head = kv.block_table.tolist()[1], 1 if heads_apart else None
    version, keys, values = kv.version, kv.view(1).keys(), kv.view(1).values()
    pool.evict(1, [block], head)
    assert not pool.resident(1, block, 1)
    assert pool.resident(0, block, 1)
    assert pool.resident(1, block, 0) == heads_apart
    with pytest.raises(SaccadeError, match="not resident"):
        kv.view(1).keys()
    with pytest.raises(SaccadeError, match="not resident"):
        kv.view(1).take(torch.tensor([20]), 1)
    with pytest.raises(SaccadeError, match="not resident"):
        kv.view(1).head_keys(1, 50)
    with pytest.raises(SaccadeError, match="not resident"):
        save_kv(kv)
    with pytest.raises(SaccadeError, match="cannot be evicted"):
        pool.evict(1, [block], head)
    assert (kv.tables[1, -1, 1] == -1).all()
    assert torch.equal(kv.view(0).keys(), k[0])
    others = pool.allocate(1, owner := pool.new_owner())  # takes the slot that was left
    pool.release(others, owner)
    pool.admit(1, [block], head)
    kv.view(1).write(16, keys[:, 16:32], values[:, 16:32])
    assert torch.equal(kv.view(1).keys(), k[1])
    assert torch.equal(kv.view(1).take(torch.tensor([20]), 1)[1], v[1, 1, 20:21])
    assert kv.version > version
    with pytest.raises(SaccadeError, match="cannot be admitted"):
        pool.admit(1, [block], head)
    if not heads_apart:
        with pytest.raises(SaccadeError, match="KV heads share slots here"):
            pool.evict(1, [block], 0)
    check_blocks(pool, [kv])


@pytest.mark.parametrize("heads_apart", [False, True])
def test_tables_say_where_rows_lie(heads_apart):
    pool = pool_of(40, heads_apart=heads_apart)
    other, kv, (k, v) = SequenceKV(pool), SequenceKV(pool), draw(50, 2)
    other.reserve(20)
    append(kv, k, v)
    positions = torch.arange(13, 37)
    mapping = kv.tables[:, :, positions // SIZE].long() * SIZE + positions % SIZE
    for layer in range(LAYERS):
        for head in range(G):
            rows = pool.storage.k[:, head].flatten(0, 1)
            assert torch.equal(rows[mapping[layer, head if heads_apart else 0]], k[layer, head, 13:37])
    logical = kv.block_table[positions // SIZE] * SIZE + positions % SIZE
    assert kv.logical_slots(13, 37) == logical.tolist()
    with pytest.raises(SaccadeError, match=r"no slots for tokens 0\.\.65: room is reserved for 64"):
        kv.logical_slots(0, 65)


@pytest.mark.parametrize("heads_apart", [False, True])
def test_rows_of_any_strides_and_offsets_are_stored(heads_apart):
    pool = pool_of(60, heads_apart=heads_apart)
    kv, (k, v) = SequenceKV(pool), draw(90, 3)
    k_turned, v_turned = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (k, v))  # heads within a row
    strided = torch.stack([k, v], -1)  # no axis is contiguous
    kv.reserve(90)
    at = 0
    for count in (1, 5, 10, 16, 1, 40, 17):
        given = (k_turned, v_turned) if count % 2 else (strided[..., 0], strided[..., 1])
        for layer in range(LAYERS):
            kv.append(layer, *(part[layer, :, at : at + count] for part in given))
        at += count
    for layer in range(LAYERS):
        assert torch.equal(kv.view(layer).keys(), k[layer])
        assert torch.equal(kv.view(layer).values(3, 77), v[layer, :, 3:77])
        assert torch.equal(kv.view(layer).head_keys(1, 33), k[layer, 1, :33])
        assert torch.equal(kv.view(layer).upto(70).keys(), k[layer, :, :70])


def test_heads_apart_have_no_one_place():
    kv = SequenceKV(pool_of(30, heads_apart=True))
    kv.reserve(3)
    with pytest.raises(SaccadeError, match="KV heads lie apart"):
        kv.place(0)
    assert kv.view(0).length == 0


def test_a_view_that_a_kernel_would_misread_is_refused():
    """Kernels read tables and pools by address."""
    own = KVView.from_tensors(*draw(40, 4)[0][:2]).paged()
    wrong = (
        (own._replace(block_table=own.block_table.long()), "must be int32"),
        (own._replace(block_table=own.block_table[0]), r"int32 \[kv_heads or 1, blocks\]"),
        (own._replace(block_table=own.block_table.repeat(1, 2)[:, ::2]), "contiguous rows"),
        (own._replace(block_table=own.block_table.repeat(3, 1)), "one for each of 2 KV heads, got 3"),
        (own._replace(k=own.k[..., ::2]), "k and v must be contiguous"),
    )
    for paged, message in wrong:
        with pytest.raises(SaccadeError, match=message):
            KVView(paged)


def test_blocks_that_are_only_kept_are_counted_through_every_change():
    rng, pool = random.Random(3), pool_of(60 * LAYERS)
    running, kept, seen = [SequenceKV(pool)], [], set()
    for _ in range(400):
        does = rng.choice(["grow", "fork", "keep", "free", "evict", "shrink"])
        if does == "grow" and (one := rng.choice(running)).length < 6 * SIZE and pool.free_logical > 8:
            append(one, *draw(rng.randrange(1, 40), 0))
        elif does == "fork" and len(running) < 8 and pool.free_logical > 8:
            source = rng.choice(running + kept)
            running.append(source.fork(source.length // SIZE * SIZE))
        elif does == "keep" and len(kept) < 6:
            source = rng.choice(running)
            kept.append(source.fork(source.length // SIZE * SIZE))
            kept[-1].keep()
        elif does == "free" and len(running) > 1:
            running.pop(rng.randrange(len(running))).free()
        elif does == "evict" and kept:
            gone = kept.pop(rng.randrange(len(kept)))
            gone.free()
            pool.keepers.end(gone.id)
        elif does == "shrink":
            one = rng.choice(running)
            one.truncate(rng.randrange(one.length + 1) // SIZE * SIZE)
        used = {block for one in running for block in one.block_table.tolist()}
        alone = {block for one in kept for block in one.block_table.tolist()} - used
        assert pool.keepers.alone == alone
        assert pool.kept_slots == len(alone) * LAYERS
        seen.add((bool(alone), bool(alone) and pool.used_blocks > len(alone) * LAYERS))
    assert (True, True) in seen
    for one in running + kept:
        one.free()
    assert pool.kept_slots == pool.used_blocks == 0
