"""Ranks whose processes have counted differently meet in a store, by C++ that calls ours."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as distributed

from saccade.engine.ranks.renumbered import RenumberedStore


def stores(path):
    """One of each of two ranks, as C++ has them: a prefix store in front of ours."""
    made = []
    for _ in range(2):
        inner = distributed.PrefixStore("symmetric", distributed.FileStore(str(path), 2))
        inner.set_timeout(datetime.timedelta(seconds=20))
        ours = RenumberedStore(inner)
        made.append((ours, distributed.PrefixStore("own", ours)))
    return made


def exchanges(store, rank, first):
    """Three, as torch's StoreExchange makes them."""
    found = []
    for number in range(first, first + 3):
        keys = [f"CUDASymmetricMemory/{number}/{one}" for one in range(2)]
        store.set(keys[rank], bytes([rank, number - first]))
        store.wait([keys[1 - rank]])
        found.append((store.get(keys[1 - rank]), store.multi_get(keys)))
    return found


@pytest.mark.parametrize("counts", [(0, 0), (7, 0), (12, 3)])
def test_exchanges_meet_from_any_count_on(tmp_path, counts):
    made = stores(tmp_path / "store")
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(exchanges, made[rank][1], rank, counts[rank]) for rank in range(2)]
        own, other = (one.result(60) for one in running)
    for number, (mine, theirs) in enumerate(zip(own, other, strict=True)):
        both = [bytes([0, number]), bytes([1, number])]
        assert mine == (both[1], both)
        assert theirs == (both[0], both)


def test_what_has_no_count_keeps_its_name(tmp_path):
    ours, outer = stores(tmp_path / "store")[0]
    outer.set("plain", b"1")
    assert outer.get("plain") == b"1"
    assert [ours.key(name) for name in ("own/plain", "a/9/1", "a/11/0", "b/4", "b/4")] == [
        "own/plain", "a/0/1", "a/2/0", "b/0", "b/0",
    ]  # fmt: skip
    assert (outer.add("sum/3", 2), outer.add("sum/3", 5)) == (2, 7)
    assert outer.check(["plain"])
    assert not outer.check(["absent"])
    assert ours.num_keys() >= 2


def test_what_does_not_come_ends_the_wait(tmp_path):
    _, outer = stores(tmp_path / "store")[0]
    with pytest.raises(RuntimeError):
        outer.wait(["CUDASymmetricMemory/3/1"], datetime.timedelta(seconds=0.2))
