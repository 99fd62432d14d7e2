"""How soon blocks that a recorded step reads in host memory have slots. CPU tensors, Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from tier_helpers import nothing_left

from saccade.kv import BlockManager, KVStorage, SequenceKV, offers
from saccade.kv.format import KVFormat
from saccade.kv.host import HostTier
from saccade.ops.triton import residency
from saccade.ops.triton.batch import KeyLists, Pages

BLOCKS, SLOTS, CHOSEN, FRESH, STEPS = 3072, 2048, 400, 8, 12


@pytest.mark.parametrize("apart", [False, True])
def test_a_long_sequence_that_chooses_the_same_blocks_soon_hits(apart, monkeypatch):
    """Of 400 absent blocks eight change from step to step, and slots hold five times as many. Parts of single heads
    have slots within a few steps; of blocks of all heads no more than MOST_LATE come in a step."""
    monkeypatch.setattr(offers, "READS_HOST", True)
    form = KVFormat(torch.float32, 2, 16, 16)
    storage = KVStorage(form, SLOTS, "cpu")
    tier = HostTier(2 * BLOCKS * form.block_bytes, storage, heads_apart=apart)
    pool = BlockManager(storage, 1, heads_apart=apart, tier=tier)
    kv, length = SequenceKV(pool), BLOCKS * 16 - 4
    for start in range(0, length, 4096):
        part = torch.randn(2, 2, min(4096, length - start), 16)
        kv.reserve(start + part.shape[2])
        kv.append(0, *part)
    tiers, tail = pool.tiers, kv.block_table[-1:].numpy()
    with tiers.fetch(0, tail):
        pass
    absent = np.nonzero(pool.map_of(0)[0, kv.block_table.numpy()] < 0)[0][: CHOSEN + FRESH * STEPS]
    assert len(absent) == CHOSEN + FRESH * STEPS
    given, logical, lengths = tiers.offer(), kv.block_table[None].int(), torch.tensor([length], dtype=torch.int32)
    most = given.late.shape[3]
    pages = Pages(storage.k, storage.v, torch.zeros(1, pool.rows, BLOCKS, dtype=torch.int32), lengths, length)
    hits = []
    for step in range(STEPS):
        flight = given.prepare(tail, tail)
        given.begin()
        own = torch.from_numpy(absent[step * FRESH : step * FRESH + CHOSEN]).int()
        lists = KeyLists(None, torch.tensor([CHOSEN, CHOSEN]), torch.stack([own, own]), 2, 16, CHOSEN)
        found = residency.find(pool, given, 0, logical, pages)
        residency.bring_later(pool, given, 0, [(logical, found, lists)])
        assert given.late_count.max() <= most
        assert given.settle(flight)
        hits.append(flight.moved.hits / (flight.moved.hits + flight.moved.misses))
        given.catch_up()
    assert hits[0] == 0
    if apart:
        assert np.mean(hits[STEPS // 2 :]) > 0.9, hits
        assert most == SLOTS // offers.LATE_SHARE
    else:
        assert most == offers.MOST_LATE  # a block costs the link each head's part, read or not
        assert hits[-1] > hits[STEPS // 2] > 0.3, hits
    kv.free()
    nothing_left(pool)


def test_how_many_come_hangs_on_a_layers_slots():
    slots = 100, 26_000, 262_144, 10**6
    assert [offers.most_late(8, some, 32) for some in slots] == [32, 32, 256, 512]
    assert [offers.most_late(1, some, 32) for some in slots] == [32] * 4
