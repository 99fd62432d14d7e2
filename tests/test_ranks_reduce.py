"""What joins ranks on GPUs, as far as a CPU shows it: which way a part goes, and what all ranks agree on."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time

import pytest
import torch

from saccade.engine.ranks import meeting, reduce
from saccade.engine.ranks.reduce import Alone, GlooReduce, OneShotReduce
from saccade.engine.ranks.watch import RankWatch, SumCounts
from saccade.errors import SaccadeError


class Shot(OneShotReduce):
    """Whose symmetric memory is gloo."""

    def __init__(self, rank: int, host: GlooReduce) -> None:
        self._rank, self._ranks, self._host, self.shots, self.others = rank, 2, host, 0, 0
        self._large = self

    def _one_shot(self, part):
        self.shots += 1
        return self._host.sum(part.clone())

    def sum(self, part):
        if reduce.takes(part, part.nbytes, reduce.MOST_SUM):
            return super().sum(part)
        self.others += 1
        return self._host.sum(part.clone())

    def gather(self, part):
        if reduce.takes(part, 2 * part.nbytes, reduce.ROOM):
            return super().gather(part)
        self.others += 1
        return self._host.gather(part)


@pytest.fixture
def both(tmp_path):
    """Run a function of a rank and what joins it to the other one, on a thread for each."""

    def run(of_rank):
        results: dict[int, object] = {}

        def rank(number: int) -> None:
            store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
            results[number] = of_rank(number, GlooReduce(store, number, 2, 20.0))

        threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results[0], results[1]

    return run


def part_of(rank: int, *shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    rng = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, generator=rng).to(dtype)


def test_small_parts_are_one_shot(both):
    """Gathered ones too, exactly: with infinities and NaN in them; all others go another way."""
    odd = torch.tensor([float("inf"), float("nan"), -1.5, 0.0] * 2, dtype=torch.float32)

    def of_rank(rank, host):
        shot = Shot(rank, host)
        small = shot.sum(part_of(rank, 3, 64))
        pair = shot.gather(part_of(rank, 5, 16))
        strange = shot.gather(odd if rank == 0 else -odd)
        assert (shot.shots, shot.others) == (3, 0)
        shot.sum(part_of(rank, reduce.MOST_SUM // 2 + 8))  # too many
        shot.sum(part_of(rank, 3))  # no 16 bytes
        shot.sum(part_of(rank, 8, dtype=torch.float16))
        shot.gather(torch.full((4,), rank))
        assert (shot.shots, shot.others) == (3, 4)
        return small, pair, strange

    first, second = both(of_rank)
    want = (part_of(0, 3, 64).float() + part_of(1, 3, 64).float()).bfloat16()
    for small, pair, strange in (first, second):
        assert torch.equal(small, want)
        assert torch.equal(torch.stack(pair), torch.stack([part_of(0, 5, 16), part_of(1, 5, 16)]))
        assert torch.equal(strange[0].isnan(), odd.isnan())
        torch.testing.assert_close(strange[1], -odd, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("trouble", [None, 0, 1, "apart"])
def test_all_ranks_take_the_same(both, monkeypatch, caplog, trouble):
    """One that has no symmetric memory leaves all of them with NCCL, and says why."""
    made: list[str] = []

    class Nccl(Alone):
        def __init__(self, store, rank, ranks, device) -> None:
            super().__init__(ranks)

    class OneShot(Alone):
        def __init__(self, store, rank, ranks, device, name, large) -> None:
            if rank == trouble:
                raise RuntimeError("no driver for it")
            made.append(name)
            super().__init__(ranks)

    monkeypatch.delenv(meeting.VARIABLE, raising=False)
    monkeypatch.setattr(meeting, "NcclReduce", Nccl)
    monkeypatch.setattr(meeting, "OneShotReduce", OneShot)
    monkeypatch.setattr(meeting, "_reaches_others", lambda device, rank, ranks: trouble != "apart" or rank == 0)
    caplog.set_level(logging.WARNING)
    device = torch.device("cuda", 0)
    found = both(lambda rank, host: type(meeting.device_reduce(None, rank, 2, device, "name", host)).__name__)
    assert found == (("OneShot",) * 2 if trouble is None else ("Nccl",) * 2)
    assert ("no driver for it" in caplog.text) == (trouble in (0, 1))
    assert ("does not reach" in caplog.text) == (trouble == "apart")
    assert made == {None: ["name"] * 2, "apart": []}.get(trouble, ["name"])


def test_what_is_asked_for(monkeypatch):
    for said in meeting.CHOICES:
        monkeypatch.setenv(meeting.VARIABLE, said)
        assert meeting.asked() == tuple(said.split(","))
        assert meeting.shares_gpus() == ("gloo" in said)
    monkeypatch.setenv(meeting.VARIABLE, "mpi")
    with pytest.raises(SaccadeError, match=r"SACCADE_REDUCE='mpi' must be one of 'one_shot,nccl', 'nccl'"):
        meeting.asked()


def test_multicast_is_off_while_ranks_meet(monkeypatch):
    """And what was said before stays as it was."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    with meeting._quiet():
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_hangs_within_a_device_step_is_found(tmp_path, waits):
    """By the processor that it does not use; not one that waits for the first rank in a sum (``waits``)."""
    process = subprocess.Popen(["sleep", "60"])
    counts, steps = (SumCounts(tmp_path / name, 2) for name in ("counts", "steps"))
    found: list[tuple[int, str]] = []
    watch = RankWatch(counts, steps, [process], 0.5, lambda rank, why: found.append((rank, why)))
    with steps.within(0):
        if waits:
            with counts.within(1):
                time.sleep(1.5)
        else:
            until = time.monotonic() + 20
            while not found and time.monotonic() < until:
                time.sleep(0.05)
    watch.close()
    process.kill()
    process.wait(10)
    assert [(rank, why[:5]) for rank, why in found] == ([] if waits else [(1, "hangs")])
