"""Decode over a disk whose blocks come while others are attended: answers are those of an engine whose memory holds
everything, however many come at once, however slowly, and whatever fails."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
from engine_helpers import tokens
from tier_helpers import FaultySystem, nothing_left
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.rows import resolved as host_resolved
from saccade.kv import disk
from saccade.kv.format import KVFormat

SLOT = KVFormat(torch.float32, 2, 32, 16).block_bytes
POLICIES = [
    "quest(budget=96, block_size=16, dense_layers=0)",
    "psa(epsilon=0.05, block_size=16, microbatch=1, rank=cuboid)",
    "psa(epsilon=0.6, block_size=16, microbatch=2)",
]
PROMPTS = [random_ids(length, seed=length) for length in (420, 390, 360)]
SOME = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = {"dtype": "float32", "prefill_chunk": 64, "exact": False, "block_size": 16, "device": "cpu"}


class LateSystem:
    """Reads that take their time, and say which cells they read."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.read = seconds, 0

    def preadv(self, fd, buffers, offset):
        time.sleep(self.seconds)
        self.read += len(buffers) // 3
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        return os.pwritev(fd, buffers, offset)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=1024, head_dim=32)


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, kv_memory="64MiB", **{"enable_prefix_caching": False, **OPTIONS}) as whole:
        return [tokens(one) for one in whole.generate(PROMPTS, SOME, policy=POLICIES)]


def answers(folder, tmp_path, slots=45, replacement="clock"):
    disk = f"{tmp_path}:64MiB"
    with LLM(
        folder,
        kv_memory=slots * SLOT,
        kv_disk=disk,
        kv_replacement=replacement,
        **{"enable_prefix_caching": False, **OPTIONS},
    ) as llm:
        done = llm.generate(PROMPTS, SOME, policy=POLICIES)
        nothing_left(llm.pool)
        return done, llm.pool.tiers.counts


@pytest.mark.parametrize(("turn", "late"), [(1, 0.0), (2, 0.002), (64, 0.0005)])
def test_answers_are_the_same_however_blocks_come(folder, tmp_path, expected, monkeypatch, turn, late):
    system, stopped = LateSystem(0.0), []
    monkeypatch.setattr("saccade.pools.DiskTier", partial(disk.DiskTier, system=system))
    monkeypatch.setattr(host_resolved, "PIPELINED", True)
    monkeypatch.setattr(disk, "LEAST_TURN", turn)
    monkeypatch.setattr(disk, "TURNS", 64)
    monkeypatch.setattr(host_resolved, "LEAST_HERE", 0.0)
    real = disk.DiskTurns.wait

    def wait(loading):
        failed = real(loading)
        stopped.append(len(loading.skipped))
        return failed

    def run(row, *given):
        early.append(bool(row._holds))
        run_row(row, *given)

    early, run_row = [], host_resolved.ResolvedRow.run
    monkeypatch.setattr(host_resolved.ResolvedRow, "run", run)
    monkeypatch.setattr(disk.DiskTurns, "wait", wait)
    monkeypatch.setattr(system, "seconds", late)
    done, counts = answers(folder, tmp_path, 64 if turn == 64 else 45, "cycle" if turn == 1 else "clock")
    assert [tokens(one) for one in done] == expected
    assert stopped
    assert counts.misses > 50
    assert counts.bytes_read > 0
    assert any(early) == (turn == 64)  # there is room for the blocks of two requests
    if turn == 2:  # so slow that a rule ends before all that it might have wanted has come
        assert sum(stopped) > 0


def test_what_cannot_be_read_is_computed_again_or_named(folder, tmp_path, expected, monkeypatch):
    system = FaultySystem()
    monkeypatch.setattr("saccade.pools.DiskTier", partial(disk.DiskTier, system=system))
    monkeypatch.setattr(host_resolved, "PIPELINED", True)
    monkeypatch.setattr(disk, "LEAST_TURN", 2)
    monkeypatch.setattr(host_resolved, "LEAST_HERE", 0.0)
    for plan in (["read error"], ["flip"] * 9, ["short read"] * 3, ["slow", "read error"] * 4):
        system.plan = [None] * 40 + plan
        done, _ = answers(folder, tmp_path)
        assert not system.plan
        for one, want in zip(done, expected):
            assert tokens(one) == want if one.error is None else "cannot be read back" in one.error
    system.always = "read error"
    done, counts = answers(folder, tmp_path)
    assert counts.lost > 0
    assert all(one.error is None or "read back" in one.error or "lost" in one.error for one in done)
