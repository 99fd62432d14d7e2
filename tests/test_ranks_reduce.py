"""What joins ranks on GPUs, as far as a CPU shows it: which way a part goes, and what all ranks agree on."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest
import torch

from saccade.engine.ranks import counts, drafted, meeting, reduce
from saccade.engine.ranks.reduce import Alone, GlooReduce, OneShotReduce
from saccade.engine.ranks.watch import RankWatch, SumCounts
from saccade.engine.steps.step import CallCount, ReadPairs
from saccade.engine.watch.device_counts import DeviceCounts
from saccade.engine.watch.layer_stats import LayerStats
from saccade.errors import SaccadeError
from saccade.methods.base import Cost
from saccade.selection import Dense, Shape, Tokens
from saccade.selection.head_part import HeadPart


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


@pytest.mark.parametrize("where", ["step", "waits", "late"])
def test_a_rank_that_hangs_within_a_device_step_is_found(tmp_path, where):
    """By the processor that it does not use; not one that waits for the first rank in a sum (``waits``), but one in a
    sum that the first has left (``late``): what it sent before it was stopped was enough there."""
    process = subprocess.Popen(["sleep", "60"])
    counts, steps = (SumCounts(tmp_path / name, 2) for name in ("counts", "steps"))
    found: list[tuple[int, str]] = []
    watch = RankWatch(counts, steps, [process], 0.5, lambda rank, why: found.append((rank, why)))
    if where == "late":
        with counts.within(0):
            pass
    with steps.within(0), nullcontext() if where == "step" else counts.within(1):
        until = time.monotonic() + (1.5 if where == "waits" else 20)
        while not found and time.monotonic() < until:
            time.sleep(0.05)
    watch.close()
    process.kill()
    process.wait(10)
    assert [(rank, why[:5]) for rank, why in found] == ([] if where == "waits" else [(1, "hangs")])


def test_a_stopped_rank_is_found_though_its_children_compute(tmp_path):
    """Compilers that it has started, say: their processor time counts as its own while it runs."""
    child = "while True: pass"
    body = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); print('begun'); input()"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    sums, steps = (SumCounts(tmp_path / name, 2) for name in ("counts", "steps"))
    found: list[tuple[int, str]] = []
    try:
        assert process.stdout.readline() == b"begun\n"
        watch = RankWatch(sums, steps, [process], 1.0, lambda rank, why: found.append((rank, why)))
        with steps.within(0):
            time.sleep(2)
            assert not found  # it gets on
            os.kill(process.pid, signal.SIGSTOP)
            until = time.monotonic() + 20
            while not found and time.monotonic() < until:
                time.sleep(0.05)
        watch.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    assert [(rank, why[:5]) for rank, why in found] == [(1, "hangs")]


class Lonely:
    """Joins one rank with itself."""

    def gather(self, part):
        return [part]


def test_what_ranks_tell_each_other_lies_on_the_host():
    """A device's tensors would come back on the device of the rank that sent them; "meta" stands for one here, from
    which nothing can be copied."""
    told = counts.exchange(Lonely(), {"a": torch.arange(3)})
    assert torch.equal(told[0]["a"], torch.arange(3))
    with pytest.raises(NotImplementedError, match="meta"):
        counts.exchange(Lonely(), {"a": torch.arange(3, device="meta")})


def test_counts_of_ranks_whose_heads_read_unlike():
    """One rank reads the same in all its heads, the other does not; one rounds more; a device estimated coverage."""
    shape = Shape(2, 2, 1, 9, 8)
    alike, unlike = DeviceCounts(), DeviceCounts()
    alike.add(CallCount(0, Dense(shape), Cost(certified={"bounds": 1}, rounding=0.5), "triton"))
    unlike.add(CallCount(0, ReadPairs(shape, torch.tensor([4, 7]), Tokens), Cost(certified={"exact": 2}), "triton"))
    unlike.layers[0].late_coverage = torch.tensor(1.5), torch.tensor(0.7)
    kept = counts.KeptCounts()
    kept._counts = unlike
    stats = counts.joined_counts([alike, kept.take()], HeadPart(0, 2)).layers[0]
    assert stats.pairs().tolist() == [9, 9, 4, 7]
    assert (stats.heads, stats.calls, stats.rounding, stats.certified) == (4, 1, 0.5, {"bounds": 1, "exact": 2})
    assert (stats.covered, stats.least_covered) == (1.5, pytest.approx(0.7))
    layer = LayerStats()
    layer.plus(stats)
    assert (layer.pairs().tolist(), layer.rounding, layer.certified) == ([9, 9, 4, 7], 0.5, {"bounds": 1, "exact": 2})


def test_a_joined_call_keeps_the_greatest_rounding():
    call = CallCount(0, Dense(Shape(2, 2, 1, 9, 8)), Cost(rounding=0.1), "triton")
    told = [drafted._Told(torch.tensor([9, 9]), Cost(rounding=rounding), None) for rounding in (0.1, None, 0.3)]
    assert drafted._joined(call, told, HeadPart(0, 3)).cost.rounding == 0.3
