"""``benchmarks/gpu/rooms.py``: what runs side by side need of each GPU, and what is made smaller; ``boards.sh``: what
it starts and what it packs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
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
    for free, why in (("0", "must be GPU=GIB, as in 0=139"), ("0=-8", "GIB must be above 0")):
        ran = subprocess.run([*words[:2], "--free", free], input=lines, capture_output=True, text=True, check=False)
        assert ran.returncode == 1
        assert f"--free {free!r}" in ran.stderr
        assert why in ran.stderr


BOARDS = SCRIPT.with_name("boards.sh")
STUB = """#!/usr/bin/env bash
[ "$1" = benchmarks/gpu/rooms.py ] && exec {python} "$@"
printf '%s\\n' "$*" >>"{words}"
while [ "$1" != --out ]; do shift; done
mkdir -p "$2/results/short" "$2/results/long" "$2/data"
head -c 3000000 /dev/urandom >"$2/results/long/predictions.jsonl"
head -c 3000000 /dev/urandom >"$2/data/samples.jsonl"
echo '{{}}' | tee "$2/results/long/scores.jsonl" "$2/results/short/scores.jsonl" >"$2/results/short/predictions.jsonl"
echo '{{}}' >"$2/placed.json"
echo "dense (B, 4096 tokens): 1 of 1 settings" >&2
sleep {rest}
"""


def ran(tmp_path: Path, rest: float, *names: str, **more: str) -> subprocess.Popen:
    """``boards.sh`` over a stub of saccade that finishes a setting at once and then takes ``rest`` seconds more."""
    stub = tmp_path / "python"
    stub.write_text(STUB.format(python=sys.executable, words=tmp_path / "words", rest=rest))
    stub.chmod(0o755)
    given = {"S": "s.gguf", "Q": "q.gguf", "G": "g.gguf", "OUT": str(tmp_path / "out"), "EVERY": "0.2", **more}
    given |= {"BOARDS": str(tmp_path / "boards"), "PYTHON": str(stub), "PATH": os.environ["PATH"]}
    words = ["bash", str(BOARDS), "60", *names]
    return subprocess.Popen(
        words, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def names_in(archive: Path) -> set[str]:
    with tarfile.open(archive) as packed:
        return {one.name for one in packed if one.isfile()}


def test_a_board_is_packed_without_samples_and_long_predictions(tmp_path):
    process = ran(tmp_path, 0, "qlong", "1:q16k")
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    for name in ("qlong", "q16k"):
        kept = {f"{name}.log", f"{name}/placed.json"}
        kept |= {
            f"{name}/results/{one}" for one in ("short/scores.jsonl", "short/predictions.jsonl", "long/scores.jsonl")
        }
        assert names_in(tmp_path / "out" / f"boards-{name}.tgz") == kept
    assert "=== q16k on GPU 1: " in out
    said = (tmp_path / "words").read_text()
    assert said.count("--kv-memory") == 2
    assert "--without psa, cuboids" in said
    assert said.count("--seconds 60 --most-seconds 240 ") == 2


def test_a_board_is_packed_as_soon_as_a_setting_is_finished(tmp_path):
    """Where the call is cut short the archive is there already."""
    process = ran(tmp_path, 30, "qlong")
    archive = tmp_path / "out" / "boards-qlong.tgz"
    try:
        until = time.monotonic() + 20
        while not archive.is_file() and time.monotonic() < until:
            time.sleep(0.1)
        assert process.poll() is None
        assert "qlong/placed.json" in names_in(archive)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate()


def test_boards_that_share_a_gpu_are_made_smaller_before_they_start(tmp_path):
    process = ran(tmp_path, 0, "qlong", "q16k", FREE="0=16.5")
    _, error = process.communicate(timeout=60)
    assert "GPU 0: 25.0 GiB needed by 2 runs (17.0 of keys and values), 16.5 free" in error
    lines = sorted((tmp_path / "words").read_text().splitlines(), key=len)
    assert [re.search(r"--together \d+ --kv-memory \S+", line)[0] for line in lines] == [
        "--together 24 --kv-memory 2.5GiB",
        "--together 24 --kv-memory 6GiB",
    ]


def test_answers_are_sized_and_packed_without_samples(tmp_path):
    stub = tmp_path / "python"
    made = "mkdir -p {0}/kv/a__dense && echo {{}} | tee {0}/kv/a.jsonl {0}/kv/a__dense/scores.jsonl >/dev/null"
    stub.write_text(
        f'#!/usr/bin/env bash\n[[ "$1" == */rooms.py ]] && exec {sys.executable} "$@"\n'
        f'[[ "$1" == */kv_*.py ]] && echo "$CUDA_VISIBLE_DEVICES $*" >>{tmp_path}/words && {made.format(tmp_path)}\n'
    )
    stub.chmod(0o755)
    given = {"OUT": str(tmp_path / "out"), "RUNS": str(tmp_path), "PYTHON": str(stub), "PATH": os.environ["PATH"]}
    given |= {"MODELS": "x/s x/q x/g", "GPUS": "0 1", "FREE": "0=12 1=139", "N": "8"}
    words = ["bash", str(SCRIPT.with_name("run_all.sh")), "answers"]
    subprocess.run(words, env=given, capture_output=True, text=True, check=True, timeout=120)
    assert {one.name for one in (tmp_path / "out").glob("answers*")} == {"answers.tgz"}
    assert names_in(tmp_path / "out" / "answers.tgz") == {"kv/a__dense/scores.jsonl"}
    lines = (tmp_path / "words").read_text().splitlines()
    assert len(lines) == 3 * 5
    for line in lines:
        on_first = "--model x/q" not in line
        assert line.startswith("0 " if on_first else "1 ")
        assert ("--together 16 --kv-memory 2GiB" if on_first else "--together 32 --kv-memory 4GiB") in line
