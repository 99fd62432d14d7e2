"""Forks, cuts and copies of a sequence's KV: each equals a sequence that was made from scratch, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from covering import quick
from kv_helpers import check_blocks, poisoned_pool

from saccade.errors import CapacityError, SaccadeError
from saccade.kv import KVFormat, KVStorage, SequenceKV
from saccade.kv.blocks import BlockManager
from saccade.kv.saved import SavedKV, load_kv, save_kv
from saccade.kv.summaries import KINDS

G, D, LAYERS, SIZE = 2, 16, 2, 16


def pool_of(slots: int, size: int = SIZE, **options):
    return poisoned_pool(slots, G, D, layers=LAYERS, block_size=size, **options)


def rows_of(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, LAYERS, G, count, D, generator=torch.Generator().manual_seed(seed))
    return k, v


def append(kv: SequenceKV, k: torch.Tensor, v: torch.Tensor, reserve: bool = True) -> None:
    if reserve:
        kv.reserve(kv.length + k.shape[2])
    for layer in range(LAYERS):
        kv.append(layer, k[layer], v[layer])


def same(kv: SequenceKV, k: torch.Tensor, v: torch.Tensor) -> None:
    """``kv`` holds these rows, and all that can be asked of it is what a fresh sequence of another pool answers."""
    fresh = SequenceKV(pool_of(LAYERS * (k.shape[2] // SIZE + 1)))
    append(fresh, k, v)
    assert kv.length == k.shape[2]
    for layer in range(LAYERS):
        ours, theirs = kv.view(layer), fresh.view(layer)
        assert torch.equal(ours.keys(), k[layer])
        assert torch.equal(ours.values(), v[layer])
        for kind in KINDS:
            assert torch.equal(ours.summary(kind, 16), theirs.summary(kind, 16))
        if ours.length:
            assert torch.equal(ours.take(torch.arange(ours.length), 1)[0], k[layer, 1])


@pytest.mark.parametrize("cut", [0, 1, 16, 31, 32, 47, 50])
@pytest.mark.parametrize("heads_apart", [False, True])
def test_cut_and_append_again_equals_fresh(cut, heads_apart):
    k, v = rows_of(1, 50)
    other_k, other_v = rows_of(2, 60)
    kv = SequenceKV(pool_of(40, heads_apart=heads_apart))
    append(kv, k, v)
    same(kv, k, v)  # makes all summaries
    kv.truncate(cut)
    same(kv, k[:, :, :cut], v[:, :, :cut])
    append(kv, other_k, other_v)  # what a draft wrote, and is taken back
    same(kv, torch.cat([k[:, :, :cut], other_k], 2), torch.cat([v[:, :, :cut], other_v], 2))
    kv.truncate(cut)
    append(kv, k[:, :, cut:], v[:, :, cut:])
    same(kv, k, v)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 33, 48])
def test_a_fork_shares_full_blocks_and_goes_its_own_way(length):
    pool, (k, v) = pool_of(60), rows_of(3, length)
    kv = SequenceKV(pool)
    append(kv, k, v)
    same(kv, k, v)
    used, kv_version = pool.used_blocks, kv.version
    child = kv.fork()
    full = length // SIZE
    assert pool.used_blocks == used + LAYERS * (length % SIZE > 0)
    assert child.block_table.tolist()[:full] == kv.block_table.tolist()[:full]
    assert not set(child.block_table.tolist()[full:]) & set(kv.block_table.tolist())
    assert kv.version == kv_version
    mine, theirs = rows_of(4, 20), rows_of(5, 7)
    append(child, *mine)
    append(kv, *theirs)
    grand = child.fork()
    more = rows_of(6, 40)
    append(grand, *more)
    wanted = [torch.cat([k, mine[0]], 2), torch.cat([v, mine[1]], 2)]
    same(child, *wanted)
    same(kv, torch.cat([k, theirs[0]], 2), torch.cat([v, theirs[1]], 2))
    same(grand, *(torch.cat(pair, 2) for pair in zip(wanted, more)))
    check_blocks(pool, [kv, child, grand])
    for one in (kv, grand, child):
        one.free()
    assert (pool.used_blocks, pool.free_logical) == (0, pool.logical_blocks)


@pytest.mark.parametrize("who", ["parent", "child"])
@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("heads_apart", [False, True])
def test_a_write_into_a_shared_block_copies_it_first(who, reserve, count, heads_apart):
    pool, (k, v), (new_k, new_v) = pool_of(20, heads_apart=heads_apart), rows_of(7, 48), rows_of(8, count)
    kv = SequenceKV(pool)
    append(kv, k, v)
    child = kv.fork()
    writer, other = (kv, child) if who == "parent" else (child, kv)
    writer.truncate(20)  # into the second block, which both hold
    assert writer.missing_blocks(20) == 0
    assert writer.missing_blocks(20 + count) == LAYERS
    append(writer, new_k, new_v, reserve)
    assert writer.missing_blocks(20 + count) == 0
    assert writer.block_table[0] == other.block_table[0]
    assert writer.block_table[1] != other.block_table[1]
    same(other, k, v)
    same(writer, torch.cat([k[:, :, :20], new_k], 2), torch.cat([v[:, :, :20], new_v], 2))
    check_blocks(pool, [kv, child])


def test_a_place_in_a_shared_block_is_one_in_its_copy():
    pool, (k, v) = pool_of(20), rows_of(9, 32)
    kv = SequenceKV(pool)
    append(kv, k, v)
    child = kv.fork()
    child.truncate(30)
    slot, offset = child.place(0)
    assert offset == 14
    assert slot not in kv.tables[:, 0, :2].flatten().tolist()
    other = kv.fork()  # of the other layer, which is behind, nothing is lost
    child.truncate(30)
    same(child, k[:, :, :30], v[:, :, :30])
    same(other, k, v)
    other.free()
    child.free()
    kv.truncate(30)
    before = kv.block_table.tolist()
    append(kv, k[:, :, 30:], v[:, :, 30:])  # nobody else holds it: written in place
    assert kv.block_table.tolist() == before


def test_copies_that_do_not_fit_take_nothing():
    pool, (k, v) = pool_of(6), rows_of(10, 40)
    kv = SequenceKV(pool)
    append(kv, k, v)
    with pytest.raises(CapacityError, match="2 KV blocks wanted but 0 of 6 are free"):
        kv.fork()
    check_blocks(pool, [kv])
    kv.truncate(32)
    child = kv.fork()
    child.truncate(20)
    taker = SequenceKV(pool)
    taker.reserve(16)
    for write in (lambda: child.reserve(21), lambda: child.place(0), lambda: append(child, *rows_of(1, 9), False)):
        with pytest.raises(CapacityError, match="2 KV blocks wanted but 0 of 6 are free"):
            write()
        assert child.length == 20
        check_blocks(pool, [kv, child, taker])
    same(child, k[:, :, :20], v[:, :, :20])


def test_copies_that_fail_give_their_blocks_back(monkeypatch):
    """The blocks that a copy was to go to belonged to nobody, for ever."""
    pool, (k, v) = pool_of(12), rows_of(10, 40)
    kv = SequenceKV(pool)
    append(kv, k, v)
    child = kv.fork()
    child.truncate(20)  # into a block that both hold
    held = pool.used_blocks

    def fails(*_):
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "copy", fails)
        for write in (kv.fork, lambda: child.reserve(60), lambda: append(child, *rows_of(1, 9), False)):
            with pytest.raises(MemoryError, match="planted"):
                write()
            assert pool.used_blocks == held
            check_blocks(pool, [kv, child])
    same(child, k[:, :, :20], v[:, :, :20])


def test_nothing_is_forked_or_saved_within_a_step():
    kv, (k, v) = SequenceKV(pool_of(20)), rows_of(11, 5)
    kv.reserve(5)
    kv.append(0, k[0], v[0])
    with pytest.raises(SaccadeError, match=r"forked within a step: its layers have \[5, 0\] tokens"):
        kv.fork()
    with pytest.raises(SaccadeError, match="saved within a step"):
        save_kv(kv)


@pytest.mark.parametrize("seed", quick(range(3), lambda seed: seed == 0))
@pytest.mark.parametrize("heads_apart", [False, True])
def test_any_history_of_forks_equals_plain_tensors(seed, heads_apart):
    """Hundreds of appends, cuts, forks, saves, loads and frees in a pool that is short at times."""
    rng, pool = random.Random(seed), pool_of(80, heads_apart=heads_apart)
    address = pool.slots.data_ptr()
    alive: list[tuple[SequenceKV, torch.Tensor, torch.Tensor]] = []
    for step in range(400):
        action = rng.choice(["new", "append", "append", "one", "cut", "cut", "fork", "fork", "free", "load"])
        if action == "new" or not alive:
            alive.append((SequenceKV(pool), *rows_of(0, 0)))
            continue
        index = rng.randrange(len(alive))
        kv, k, v = alive[index]
        try:
            if action in ("append", "one"):
                fresh = rows_of(step, 1 if action == "one" else rng.randint(1, 40))
                append(kv, *fresh)
                alive[index] = kv, torch.cat([k, fresh[0]], 2), torch.cat([v, fresh[1]], 2)
            elif action == "cut":
                length = rng.randint(0, k.shape[2])
                kv.truncate(length)
                alive[index] = kv, k[:, :, :length], v[:, :, :length]
            elif action == "fork":
                alive.append((kv.fork(), k, v))
            elif action == "load":
                alive.append((load_kv(pool, save_kv(kv)), k, v))
            else:
                kv.free()
                del alive[index]
        except CapacityError:
            alive.pop(rng.randrange(len(alive)))[0].free()
        check_blocks(pool, [one[0] for one in alive])
        for kv, k, v in rng.sample(alive, min(len(alive), 2)):
            assert kv.length == k.shape[2]
            layer = rng.randrange(LAYERS)
            assert torch.equal(kv.view(layer).keys(), k[layer])
            assert torch.equal(kv.view(layer).values(), v[layer])
            kv.view(layer).summary("minmax", 16)
    for kv, k, v in alive:
        same(kv, k, v)
        kv.free()
    assert (pool.used_blocks, pool.free_logical) == (0, pool.logical_blocks)
    assert pool.slots.data_ptr() == address


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("heads_apart", [False, True])
def test_what_is_saved_is_loaded_anywhere(size, heads_apart):
    """Into the same pool, and into one of other blocks whose heads lie apart; kept summaries come along."""
    pool, (k, v) = pool_of(40), rows_of(12, 50)
    kv = SequenceKV(pool)
    append(kv, k, v)
    made = kv.view(1).summary("moments", 16).clone()
    saved = save_kv(kv)
    assert saved.metadata == {
        "version": 1, "layers": LAYERS, "kv_heads": G, "head_dim": D, "dtype": "float32", "length": 50
    }  # fmt: skip
    assert sorted(saved.tensors) == ["k", "summary/1/moments/16", "v"]
    target = pool_of(40, size, heads_apart=heads_apart)
    for into in (pool, target):
        loaded = load_kv(into, saved)
        assert torch.equal(loaded.view(1).summary("moments", 16), made)
        same(loaded, k, v)
        check_blocks(into, [kv, loaded] if into is pool else [loaded])
    kv.truncate(3)
    assert saved.tensors["k"].shape == (LAYERS, G, 50, D)  # copies: what happens to the sequence is nothing to them
    assert torch.equal(saved.tensors["k"], k)


def test_a_sequence_moves_to_another_pool():
    pool, target, (k, v) = pool_of(40), pool_of(40, 32), rows_of(13, 37)
    kv = SequenceKV(pool)
    append(kv, k, v)
    moved = load_kv(target, save_kv(kv))
    same(moved, k, v)
    small = pool_of(4)
    with pytest.raises(CapacityError, match="6 KV blocks wanted but 4 of 4 are free"):
        load_kv(small, save_kv(moved))
    same(moved, k, v)
    assert small.used_blocks == 0


def test_kv_of_another_layout_is_refused():
    kv, (k, v) = SequenceKV(pool_of(40)), rows_of(14, 20)
    append(kv, k, v)
    saved = save_kv(kv)
    other = BlockManager(KVStorage(KVFormat(torch.bfloat16, G, D), 40), LAYERS)
    with pytest.raises(
        SaccadeError, match="dtype='float32', but this storage has 'bfloat16'; dtype='float32' reads it"
    ):
        load_kv(other, saved)
    with pytest.raises(SaccadeError, match="saved KV has version=7, but this storage has 1"):
        load_kv(pool_of(40), SavedKV(saved.tensors, saved.metadata | {"version": 7}))
