"""``benchmarks/python_overhead.py`` counts the package's own calls and frames of decode steps alone."""

from __future__ import annotations

import re
from pathlib import Path

import fork_server

FILE = Path(__file__).parents[1] / "benchmarks" / "python_overhead.py"


def test_counts_grow_with_the_batch_and_chains_begin_at_the_step():
    command = [
        str(FILE),
        "--policies",
        "dense;psa(rank=cuboid)",
        "--batches",
        "1,4",
        "--chains",
    ]
    ran = fork_server.run(command)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()[1:]
    rows = [re.fullmatch(r"(\S+) +(\d+) +(\d+) +([\d.]+) +(\d+)  (\d+) \((\w+)\)", line) for line in lines[::2]]
    assert [(row[1], row[2]) for row in rows] == [(p, b) for p in ("dense", "psa(rank=cuboid)") for b in ("1", "4")]
    calls = [int(row[3]) for row in rows]
    assert 0 < calls[0] < calls[1]
    assert calls[0] < calls[2] < calls[3]  # choosing takes calls
    for row, chain in zip(rows, lines[1::2]):
        names = chain.split(" > ")
        assert names[0].strip() == "Engine.step"
        assert names[-1] == row[7]
        assert len(names) == int(row[6]) + 1
        assert int(row[5]) < 20  # not some for each layer and request
        assert "Engine.step" not in names[1:]
