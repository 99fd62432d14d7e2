"""KV beyond memory: what leaves comes back as it was, or is known to be lost; sequences never notice."""

from __future__ import annotations

import errno
import os
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from tier_helpers import FaultySystem, nothing_left

from saccade.errors import CapacityError, SaccadeError
from saccade.kv import BlockManager, KVFormat, KVStorage, KVView, SequenceKV
from saccade.kv.disk import DiskTier
from saccade.kv.host import HostTier
from saccade.kv.host_disk import HostAndDisk
from saccade.kv.replacement import POLICIES, Replacement
from saccade.kv.saved import load_kv, save_kv
from saccade.kv.tier import LostKV, Part, TierError, TierFull
from saccade.kv.tiers import Tiers
from saccade.machine import folder_and_size

FORMAT = KVFormat(torch.float32, 2, 16, 16)
MIB = 1 << 20


def tiered(folder, slots: int = 12, layers: int = 2, disk: int = MIB, system=os, host=False, **options) -> BlockManager:
    storage = KVStorage(FORMAT, slots, "cpu")
    storage.k.fill_(float("nan"))
    storage.v.fill_(float("nan"))
    if host:
        if host == "disk":
            return BlockManager(
                storage,
                layers,
                tier=HostAndDisk(16 * FORMAT.block_bytes, storage, folder, disk, system),
                debug=True,
                **options,
            )
        apart = host == "head"
        tier = HostTier(disk, storage, heads_apart=apart)
        return BlockManager(storage, layers, heads_apart=apart, tier=tier, debug=True, **options)
    return BlockManager(storage, layers, tier=DiskTier(folder, disk, storage, system), debug=True, **options)


def rows(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, 16, generator=rng), torch.randn(2, tokens, 16, generator=rng)


def filled(pool: BlockManager, tokens: int, seed: int = 0, step: int = 50) -> SequenceKV:
    kv = SequenceKV(pool)
    for start in range(0, tokens, step):
        stop = min(tokens, start + step)
        kv.reserve(stop)
        for layer in range(pool.layers):
            k, v = rows(tokens, seed + layer)
            kv.append(layer, k[:, start:stop], v[:, start:stop])
    return kv


def check(kv: SequenceKV, tokens: int, seed: int = 0, length: int | None = None) -> None:
    stop = tokens if length is None else length
    for layer in range(kv.layers):
        k, v = rows(tokens, seed + layer)
        view = kv.view(layer)
        assert torch.equal(view.keys(0, stop), k[:, :stop])
        assert torch.equal(view.values(5, stop), v[:, 5:stop])
        assert torch.equal(view.head_keys(1, stop - 3), k[1, : stop - 3])
        some = torch.tensor([stop - 1, 0, 17, stop // 2, 0])
        for got, want in zip(view.take(some, 1), (k, v)):
            assert torch.equal(got, want[1, some])


@pytest.mark.parametrize("host", [False, True, "head", "disk"])
@pytest.mark.parametrize("policy", POLICIES)
def test_sequences_larger_than_memory_read_as_written(tmp_path, policy, host):
    pool = tiered(tmp_path, replacement=policy, host=host)
    one, other = filled(pool, 333), filled(pool, 150, seed=9)
    rng = random.Random(1)
    for _ in range(4):
        check(one, 333) if rng.random() < 0.5 else check(other, 150, seed=9)
    summary = one.view(1).summary("minmax", 32)
    k, v = rows(333, 1)
    assert torch.equal(summary, KVView.from_tensors(k, v).summary("minmax", 32))
    written = pool.tiers.counts.bytes_written
    for _ in range(3):
        check(one, 333)
    assert (
        pool.tiers.counts.bytes_written - written <= 12 * pool.tiers.heads * pool.tiers.tier.cell_bytes
    )  # sealed blocks have a copy
    assert pool.tiers.counts.misses > 0
    assert os.listdir(tmp_path) == []  # the file has no name
    one.free()
    other.free()
    nothing_left(pool)


@pytest.mark.parametrize("host", [False, True, "head", "disk"])
def test_forks_cuts_and_copies_of_what_is_not_resident(tmp_path, host):
    pool = tiered(tmp_path, host=host)
    one = filled(pool, 300)
    fork = one.fork(203)
    check(fork, 300, length=203)
    one.truncate(245)
    k, v = rows(300, 77)
    one.reserve(300)
    for layer in range(2):
        one.append(layer, k[:, 245:], v[:, 245:])
    filled(pool, 200, seed=3).free()  # drives out what was just written
    for layer in range(2):
        assert torch.equal(one.view(layer).keys(245), k[:, 245:])
        assert torch.equal(one.view(layer).keys(0, 245), rows(300, layer)[0][:, :245])
    fork.truncate(100)  # into a block that both hold
    fork.reserve(120)
    for layer in range(2):
        fork.append(layer, k[:, :20], v[:, :20])
    assert torch.equal(fork.view(0).keys(100), k[:, :20])
    assert torch.equal(one.view(0).keys(0, 245), rows(300, 0)[0][:, :245])
    loaded = load_kv(pool, save_kv(one))
    assert torch.equal(loaded.view(1).keys(245), k[:, 245:])
    for kv in (one, fork, loaded):
        kv.free()
    nothing_left(pool)


@pytest.mark.parametrize("host", [False, True, "head", "disk"])
def test_summaries_take_the_memory_of_slots(tmp_path, host):
    pool = tiered(tmp_path, slots=41, host=host)
    one, other = filled(pool, 400), filled(pool, 400, seed=3)
    slot = FORMAT.block_bytes
    for layer in range(2):
        one.view(layer).summary("minmax", 8)
        one.view(layer).summary("cuboid", 8)
    bytes_made = sum(summary.nbytes for kind in ("minmax", "cuboid") for summary in one.summaries(kind, 8))
    one.reserve(401)
    assert pool.tiers.slots == 40
    pool.advance()
    assert pool.tiers.slots == 40 - -(-bytes_made // slot) < 32
    assert pool.free_slots >= 0
    check(one, 400)
    check(other, 400, seed=3)
    fork = one.fork()
    pool.advance()
    assert pool.tiers.slots == max(8, 40 - -(-2 * bytes_made // slot))
    check(fork, 400)
    for kv in (one, other, fork):
        kv.free()
    nothing_left(pool)


def test_memory_and_disk_together_hold_what_both_have_room_for(tmp_path):
    cell = DiskTier(tmp_path, MIB, KVStorage(FORMAT, 1, "cpu")).cell_bytes
    pool = tiered(tmp_path, slots=21, disk=4096 + 30 * cell + 5)
    assert pool.num_blocks == 20 + 30 - 8
    tokens = pool.num_blocks // 2 * 16
    kv = filled(pool, tokens)
    assert pool.free_blocks == 0
    assert pool.tiers.tier.free_cells < 30
    with pytest.raises(CapacityError):
        kv.reserve(tokens + 1)
    for _ in range(3):
        check(kv, tokens)
    kv.free()
    nothing_left(pool)


def test_too_much_at_once_is_an_error_of_the_caller(tmp_path):
    pool = tiered(tmp_path)
    kv = filled(pool, 300)
    with pytest.raises(SaccadeError, match="raise kv_memory"):
        kv.view(0).paged()
    with pytest.raises(TierFull, match="raise kv_memory"):
        kv.view(0).hold(np.arange(12))
    with kv.view(0).hold(np.arange(4)):
        check(kv, 300)  # in what is left
    with pytest.raises(SaccadeError, match="too small for tiers"):
        tiered(tmp_path, slots=8)
    kv.free()
    nothing_left(pool)


@pytest.mark.parametrize("fault", ["flip", "short read", "read error"])
def test_reads_that_fail_are_tried_again_and_then_known(tmp_path, fault):
    system = FaultySystem()
    pool = tiered(tmp_path, system=system)
    kv = filled(pool, 300)
    system.plan = [fault, None, fault]  # once each, and not again
    check(kv, 300)
    assert pool.tiers.counts.retries > 0
    assert not kv.damaged
    system.always = fault
    with pytest.raises(LostKV, match="cannot be read back"):
        check(kv, 300)
    system.always = None
    assert kv.damaged
    with pytest.raises(LostKV):
        check(kv, 300)
    kv.free()
    nothing_left(pool)
    check(filled(pool, 300), 300)


@pytest.mark.parametrize("fault", ["torn", "rotten", "stale"])
def test_what_was_written_wrong_is_never_taken_for_right(tmp_path, fault):
    system = FaultySystem()
    system.writes = fault
    pool = tiered(tmp_path, system=system)
    kv = filled(pool, 200)
    with pytest.raises(LostKV):
        check(kv, 200)
    kv.free()
    nothing_left(pool)


@pytest.mark.parametrize("fault", ["stale", "torn"])
def test_an_older_version_of_a_part_in_its_own_cell_is_never_taken(tmp_path, fault):
    """The first write came there, rows were added, and the second write of the same part to the same cell did not."""
    system = FaultySystem()
    pool = tiered(tmp_path, layers=1, system=system)
    kv = filled(pool, 40)  # the last of three blocks is half full
    tiers, last = pool.tiers, int(kv.block_table[-1])
    others = [filled(pool, 150, seed=5), filled(pool, 150, seed=7)]
    for other in others + others:
        other.view(0).keys()  # all of theirs is written, whatever happens to writes from here on
    assert not pool.resident(0, last)
    before = int(tiers._cell[0, last])
    assert torch.equal(kv.view(0).keys(0, 40), rows(40, 0)[0])  # comes back as it was
    k, v = rows(44, 0)
    kv.reserve(44)
    kv.append(0, k[:, 40:], v[:, 40:])
    system.writes = fault
    for other in others + others:
        other.view(0).keys()  # drives it out again
    system.writes = None
    assert not pool.resident(0, last)
    assert tiers._cell[0, last] == before  # the same cell, or this test shows nothing
    with pytest.raises(LostKV):
        kv.view(0).keys()
    assert kv.damaged
    for each in (kv, *others):
        each.free()
    nothing_left(pool)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, "short"])
def test_writes_that_fail_cost_nothing_that_is_there(tmp_path, code):
    system = FaultySystem()
    pool = tiered(tmp_path, slots=25, system=system)
    kv = filled(pool, 150)
    system.writes = code
    with pytest.raises(TierError, match="cannot be written"):
        filled(pool, 150, seed=5)
    check(kv, 150)  # all of it is still in memory, or was written before
    system.writes = None
    check(filled(pool, 150, seed=6), 150, seed=6)
    check(kv, 150)


def test_the_disk_tier_refuses_what_it_cannot_use(tmp_path):
    storage = KVStorage(FORMAT, 4, "cpu")
    file = tmp_path / "file"
    file.write_text("")
    for bad in (file, file / "below"):
        with pytest.raises(SaccadeError, match="nothing can be written"):
            DiskTier(bad, MIB, storage)
    with pytest.raises(SaccadeError, match="holds no KV block"):
        DiskTier(tmp_path, 4096, storage)
    for text in ("", "5GiB", ":5GiB", "a:", "a:b", 5, None):
        with pytest.raises(SaccadeError, match="kv_disk"):
            folder_and_size(text, "kv_disk")
    assert folder_and_size("/a:b/c:5KiB", "kv_disk") == (Path("/a:b/c"), 5120)
    tier = DiskTier(tmp_path, MIB, storage)
    descriptor, gone = tier._fd, weakref.ref(tier)
    assert os.pread(descriptor, 4096, 0).startswith(b'{"kind": "saccade KV parts", "version": 2')
    del tier
    assert gone() is None
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@pytest.mark.parametrize("host", [True, "head"])
def test_where_cells_run_short_many_are_given_up_at_once(tmp_path, host, monkeypatch):
    """Whose cells can be had takes a look at all parts: not for every few parts that leave."""
    looks = []
    reclaim = Tiers._reclaim
    monkeypatch.setattr(Tiers, "_reclaim", lambda self, *given: looks.append(self.row) or reclaim(self, *given))
    pool = tiered(tmp_path, slots=3001, host=host, disk=2500 * FORMAT.block_bytes)
    kv = filled(pool, 2600 * 16, step=10400)
    assert pool.absent > 2000
    assert 0 < len(looks) < 60 * pool.rows, len(looks)
    check(kv, 2600 * 16)
    kv.free()
    nothing_left(pool)


def test_full_blocks_are_on_the_host_before_they_leave(tmp_path):
    pool = tiered(tmp_path, slots=24 + 1, layers=2, host=True)
    counts, size = pool.tiers.counts, pool.tiers.tier.cell_bytes
    one = filled(pool, 9 * 16, step=16)
    assert counts.bytes_written == 0  # slots are not short
    two = filled(pool, 3 * 16 + 5, seed=5, step=16)  # blocks are full one after the other, the last one is not
    written = counts.bytes_written
    assert written >= 2 * size
    with pool.tiers.fetch(0, two.block_table[:3].numpy()):
        pass
    assert pool.tiers.tier.free_cells < pool.tiers.tier.cells
    check(one, 9 * 16)
    check(two, 3 * 16 + 5, seed=5)
    one.free()
    two.free()
    nothing_left(pool)


@pytest.mark.parametrize("count", [1, 20])
def test_rows_after_a_device_listed_their_block_are_not_lost(tmp_path, count):
    """Slots that a device may take are listed with copies of what they hold; rows that the host stores in such a block
    in the same step, with nothing absent, make its copy the past."""
    pool = tiered(tmp_path, slots=20, host=True)
    kv, tokens = SequenceKV(pool), 40 + count
    for start, stop in ((0, 40), (40, tokens)):
        kv.reserve(stop)
        if start:
            pool.tiers.offer()._rows[0]._offerable(19)
            assert pool.absent == 0
            assert pool.tiers.stored == 2 * len(kv.block_table)
        for layer in range(2):
            k, v = rows(tokens, layer)
            kv.append(layer, k[:, start:stop], v[:, start:stop])
    pool.tiers._evict(2 * len(kv.block_table), 0)
    assert pool.absent == 2 * len(kv.block_table)
    check(kv, tokens)


@pytest.mark.parametrize("fault", [None, "flip", "stale", 28])
def test_a_disk_behind_host_memory(tmp_path, fault):
    """Three sequences over 11 slots, 16 cells of the host and a disk, of which the one that is read stays near."""
    system = FaultySystem()
    pool = tiered(tmp_path, host="disk", system=system)
    tiers, tier = pool.tiers, pool.tiers.tier
    one, other = filled(pool, 160), filled(pool, 160, seed=9)
    check(one, 160)
    before = tier.disk.counts.bytes_read
    assert before > 0
    if fault is None:
        for _ in range(2):
            one.view(1).keys()
        assert tier.disk.counts.bytes_read - before <= 10 * tier.disk.cell_bytes  # it lies in host memory since
        check(other, 160, seed=9)
        places = tier.places()
        assert places["host"][0] <= places["host"][1] == 16
        assert places["disk"][0] > 0
    elif fault == "flip":
        system.always = fault
        with pytest.raises(LostKV):
            check(other, 160, seed=9)
        assert other.damaged
        system.always = None
        check(one, 160)
    else:
        system.writes = fault  # what is new stays in memory, or is lost and known to be; what was there is there
        with pytest.raises(LostKV if fault == "stale" else TierError):
            check(filled(pool, 600, seed=3), 600, seed=3)
        system.writes = None
        assert tiers.counts.lost == 0 or fault == "stale"
    for kv in (one, other):
        kv.free()
    if fault != 28 and fault != "stale":
        nothing_left(pool)


def test_host_memory_and_a_disk_hold_what_both_have_room_for(tmp_path):
    storage = KVStorage(FORMAT, 12, "cpu")
    tier = HostAndDisk(16 * FORMAT.block_bytes, storage, tmp_path, 40 * (FORMAT.block_bytes + 64) + 4096)
    assert (tier.host_cells, tier.disk.cells, tier.cells) == (16, 40, 54)
    pool = BlockManager(storage, 2, tier=tier, debug=True)
    blocks = pool.free_blocks // 2
    assert blocks == (11 + 54 - 8) // 2
    kv = filled(pool, 16 * blocks)
    for _ in range(2):
        check(kv, 16 * blocks)
    assert pool.tiers.counts.lost == 0
    kv.free()
    nothing_left(pool)
    with pytest.raises(SaccadeError, match=r"kv_host=.* holds 7 KV blocks, too few .* at least 32768 bytes"):
        HostAndDisk(7 * FORMAT.block_bytes, storage, tmp_path, MIB)
    with pytest.raises(SaccadeError, match=r"kv_disk=.* holds no KV block"):
        HostAndDisk(16 * FORMAT.block_bytes, storage, tmp_path, 4096)


def test_a_cell_of_another_block_is_never_taken(tmp_path):
    pool = tiered(tmp_path, slots=12, host=True)
    kv = filled(pool, 300)
    tiers, tier = pool.tiers, pool.tiers.tier
    layer, block = next((0, b) for b in kv.block_table.tolist() if not pool.resident(0, b))
    tier._owner[tiers._cell[layer, block] - 1, 2] += 1  # as if it were of a later holder
    with pytest.raises(LostKV, match="host"):
        kv.view(layer).keys()
    assert kv.damaged
    assert tiers.counts.lost == 1
    kv.free()
    nothing_left(pool)


def test_what_one_head_wants_moves_for_that_head_and_the_others_are_not_there_to_be_read(tmp_path):
    pool = tiered(tmp_path, slots=21, host="head")
    kv, tiers = filled(pool, 600), pool.tiers
    view = kv.view(0)
    absent = np.nonzero((pool.lookup(kv.block_table.tolist())[0] < 0).all(0))[0]
    assert len(absent) > 20
    k, v = rows(600, 0)
    some = torch.from_numpy(absent[:5] * 16 + 3)
    before = tiers.counts.copy()
    got = view.take(some, 1)
    assert torch.equal(got[0], k[1, some])
    assert torch.equal(got[1], v[1, some])
    moved = tiers.counts.since(before)
    assert (moved.misses, moved.bytes_read) == (5, 5 * FORMAT.block_bytes // 2)
    ids = kv.block_table.numpy()
    own = [absent[:2], absent[1:5]]
    with view.hold(absent[:5], heads=own):
        paged = view.held(absent[:5], own).paged()
        for head in range(2):
            assert (paged.block_table[head, np.delete(np.arange(38), own[head])] == tiers.guard).all()
            for block in own[head]:
                lies, there = paged.block_table[head, block], slice(block * 16, block * 16 + 16)
                assert torch.equal(paged.k[lies, head], k[head, there])
                assert torch.equal(paged.v[lies, head], v[head, there])
        with pytest.raises(TierFull):  # 4 of head 1 stay
            kv.view(1).hold(np.arange(17))
        with kv.view(1).hold(np.arange(16)):
            pass
    assert paged.k[tiers.guard].isnan().all()  # whoever reads what was not brought in sees it
    slot = int(pool.map_of(1)[0, ids[absent[4]]])
    tiers.each[1]._vacate(0, ids[absent[4:5]])
    assert pool.storage.k[slot, 1].isnan().all()
    assert not pool.storage.k[slot, 0].isnan().all() or slot in pool.free_list(0)
    check(kv, 600)
    owner = tiers.each[0].tier._owner
    owner[owner[:, 2] > 0, 2] += 1  # head 0's cells, as if they were of a later holder
    with pytest.raises(LostKV, match="host"):
        view.keys(0, 600)
    assert kv.damaged
    kv.free()
    nothing_left(pool)


def test_the_host_tier_refuses_what_it_cannot_have():
    storage = KVStorage(FORMAT, 12, "cpu")
    for size, said in ((100, "holds no KV block"), (1 << 60, "more than the")):
        with pytest.raises(SaccadeError, match=f"kv_host=.*{said}"):
            HostTier(size, storage)
    tier = HostTier(MIB, storage)
    assert tier.cells == tier.free_cells == MIB // FORMAT.block_bytes
    assert tier.write([Part(0, 0, 1)], [3]) == [1]
    tier.close()
    tier.close()


def test_who_leaves_first():
    def leaving(policy: str, used: list[int], count: int) -> list[int]:
        turn = Replacement(6, policy)
        for slot in (3, 1, 4, 0, 5, 2):
            turn.place(np.array([slot]), np.array([10 + slot]))
        for slot in used:
            turn.touch(np.array([slot]))
        return turn.victims(count, lambda slots, held: slots != 5).tolist()

    assert leaving("fifo", [3, 1], 4) == [13, 11, 14, 10]
    assert leaving("lru", [3, 1], 4) == [14, 10, 12, 13]
    assert leaving("cycle", [3, 1], 4) == [11, 13, 12, 10]  # the most recent first, within a turn
    assert leaving("clock", [0, 1, 2], 2) == [13, 14]
    assert leaving("clock", [0, 1, 2], 4) == [13, 14, 10, 11]  # a second chance, not a third
    assert [leaving(policy, [0], 0) for policy in POLICIES] == [[]] * len(POLICIES)
    some = [leaving("random", [], 3) for _ in range(2)]
    assert some[0] == some[1]  # chance, but the same in every run
    assert len(set(some[0])) == 3
    assert 15 not in some[0]


def test_what_is_read_round_and_round_is_kept_in_part_by_chance_or_by_the_layers_turns():
    def hits(policy: str) -> int:
        turn, where, found = Replacement(50, policy), {}, 0
        for part in list(range(100)) * 20:
            turn.turn(part // 10)
            if part in where:
                turn.touch(np.array([where[part]]))
                found += 1
                continue
            slot = len(where)
            if slot == 50:
                slot = where.pop(int(turn.victims(1, lambda slots, held: held >= 0)[0]))
            where[part] = slot
            turn.place(np.array([slot]), np.array([part]))
        return found

    assert hits("lru") == hits("fifo") == 0
    assert hits("clock") < 100
    assert hits("random") > 300
    assert hits("cycle") > 800  # of 1,000 that could be


def test_by_turns_what_no_layer_has_used_of_late_leaves_first():
    turn = Replacement(6, "cycle")
    turn.place(np.arange(6), np.arange(10, 16))
    for layer in (0, 1, 2, 0, 1, 2):
        turn.turn(layer)
        turn.touch(np.array([layer]))
    turn.turn(0)
    order = [13, 14, 15, 12, 11, 10]  # 3 to 5 not at all; then the layers, the last one first
    assert turn.victims(6, lambda slots, held: held >= 0).tolist() == order
    turn.sees_turns = False
    assert turn.victims(6, lambda slots, held: held >= 0).tolist() == [13, 14, 15, 10, 11, 12]
