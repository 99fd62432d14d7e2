"""``benchmarks/gpu/rooms.py``: what runs side by side need of each GPU, and what is made smaller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu" / "rooms.py"
# What was asked of one H200 on 2026-11-29, with three processes of 8 GiB beside it that found no room.
POOLS = {"q16k": 12, "q32k": 14, "qlong": 5, "qlong2": 5, "qwide": 10, "qprefill": 6, "g16k": 16, "gwide": 10}


@pytest.fixture
def rooms(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    module = __import__("rooms")
    yield module
    del sys.modules["rooms"]


def runs(rooms, gpu: str = "0", **pools: int) -> list:
    return [
        rooms.Run(gpu, name, f"-m x --together 48 --kv-memory {size}GiB --drift 64") for name, size in pools.items()
    ]


def test_what_fits_runs_as_it_was_asked(rooms):
    given = runs(rooms, qlong=8, q16k=12)
    found, said = rooms.fitted(given, {"0": 139.0})
    assert found == given
    assert said == ["GPU 0: 28.0 GiB needed by 2 runs (20.0 of keys and values), 139.0 free"]


@pytest.mark.parametrize("free", [70.0, 100.0, 138.0])
def test_what_does_not_fit_becomes_smaller_until_it_does(rooms, free):
    given = [*runs(rooms, **POOLS), *runs(rooms, s=8, q=8, g=8), *runs(rooms, gpu="1", other=8)]
    found, said = rooms.fitted(given, {"0": free, "1": 139.0})
    mine = [run for run in found if run.gpu == "0"]
    assert sum(run.pool + rooms.BESIDE for run in mine) <= free
    assert all(run.pool >= rooms.LEAST for run in mine)
    assert {rooms.TOGETHER.search(run.words)[1] for run in mine} == {str(int(48 * (free - 44) / 102))}
    assert "become" in said[0]
    assert found[-1] == given[-1], "the other GPU has room"
    assert all(run.words.startswith("-m x") and run.words.endswith("--drift 64") for run in found)


def test_no_room_at_all_names_the_runs(rooms):
    with pytest.raises(SystemExit, match=r"43.0 GiB needed by 8 runs.*start fewer of a, b"):
        rooms.fitted(runs(rooms, a=2, b=2, c=1, d=2, e=1, f=1, g=1, h=1), {"0": 20.0})
    with pytest.raises(SystemExit, match="does not say its --kv-memory"):
        rooms.fitted([rooms.Run("0", "a", "--together 8")], {"0": 20.0})


def test_small_pools_are_counted_in_mebibytes(rooms):
    given = rooms.Run("0", "a", "--kv-memory 512MiB --together 2")
    assert given.pool == 0.5
    found, _ = rooms.fitted([given], {"0": 5.0})
    assert found == [given]
    assert given.smaller(0.5).words == "--kv-memory 256MiB --together 2"


def test_lines_go_in_and_come_out(tmp_path):
    lines = "0\ta\t--together 48 --kv-memory 8GiB\n1\tb\t--together 16 --kv-memory 8GiB\n"
    words = [sys.executable, str(SCRIPT), "--free", "0=8", "--free", "1=139"]
    ran = subprocess.run(words, input=lines, capture_output=True, text=True, check=True)
    assert ran.stdout == "0\ta\t--together 24 --kv-memory 4GiB\n1\tb\t--together 16 --kv-memory 8GiB\n"
    assert "GPU 0: 12.0 GiB needed" in ran.stderr
    assert subprocess.run(words, input="0 a\n", capture_output=True, text=True, check=False).returncode == 1
