"""How many own frames lie between a step and its kernels, for every policy (benchmarks/frames.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fork_server
import pytest

from saccade.ops import cpu

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from short_context import every_policy  # noqa: E402

DECODE, PREFILL = 8, 12
DEEPER = {"infinigen(skew=off)": 9, "rocketkv": 9, "vattention": 12, "twilight": 13}  # at which they stay


@pytest.mark.skipif(not cpu.available(), reason="the C++ kernels are not built")
def test_kernels_lie_close_below_a_step():
    """In a process of its own, since what watches kernels stays; answers cross the end of a block of 16 keys."""
    env = {name: value for name, value in os.environ.items() if name != "SACCADE_DEBUG"}  # whose checks lie deeper
    command = [str(BENCHMARKS / "frames.py"), "--tokens", "298", "--answer", "9", "--chains"]
    ran = fork_server.run(command, timeout=300, env=env)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()[1:]
    found = [(line.split(), ways) for line, *ways in zip(lines[::3], lines[1::3], lines[2::3])]
    assert [policy for (policy, *_), _ in found] == every_policy()
    for (policy, prefill, decode), (first, then) in found:
        assert 6 <= int(prefill) <= PREFILL, f"{policy}: {first}"
        assert 5 <= int(decode) <= DEEPER.get(policy, DECODE), f"{policy}: {then}"
