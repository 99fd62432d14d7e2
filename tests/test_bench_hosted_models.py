"""benchmarks/gpu/hosted_models.py on the reference model, where CPU tensors stand for the device, and index_times.py:
what their rows say is so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from saccade.ops import cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
LENGTH, STEPS, LAYERS = 640, 8, 6
CHOSEN = ("dense", "Quest, a list a KV head", "MagicPIG", "LFPS", "LFPS to the letter")


def ran(tmp_path_factory, module: str, options: list[str]):
    """Rows of a benchmark of that folder, which is no package, and what it prints."""
    folder = tmp_path_factory.mktemp(module)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("harness", module):
            patch.delitem(sys.modules, name, raising=False)
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "gpu"))
        import harness

        made = __import__(module)
        patch.setattr(harness, "OUT", folder)
        patch.setattr(sys, "argv", [module, *options])
        made.main()
    for name in ("harness", module):
        sys.modules.pop(name)
    rows = json.loads((folder / f"{module}.json").read_text())["rows"]
    return rows, made.table(rows)


@pytest.fixture(scope="module")
def hosted(tmp_path_factory):
    options = ["--model", "reference", "--lengths", str(LENGTH), "--sequences", "2", "--steps", str(STEPS)]
    return ran(tmp_path_factory, "hosted_models", [*options, "--device", "cpu", "--policies", *CHOSEN])


def test_every_policy_has_a_row_alone_and_in_sub_batches(hosted):
    rows, table = hosted
    cases = [(row["name"], row["sequences"], row["parts"]) for row in rows]
    alone = [("dense, on the device", 1, 1), *((name, 1, 1) for name in CHOSEN)]
    both = [("dense, on the device", 2, 1), *((name, 2, parts) for name in CHOSEN[:-1] for parts in (1, 2))]
    assert cases == [*alone, *alone, *both]  # alone by length, and at the head of those together
    assert len(table.splitlines()) == 2 + len(rows)


def test_what_crosses_the_link_is_queries_new_rows_and_results(hosted):
    for row in hosted[0]:
        if row["name"] == "dense, on the device":
            assert (row["down"], row["up"], row["attend_ms"]) == (0, 0, 0)
            continue
        assert row["paths"] == "['host']"
        assert row["fetched"] == 0
        assert row["down"] > row["up"] > 0
        assert row["attend_ms"] > 0


def test_answers_and_what_was_read(hosted):
    rows, _ = hosted
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["sequences"] / row["ms"], rel=1e-3)
        if row["name"].startswith("dense"):
            assert (row["read"], row["like_dense"]) == (1, STEPS)
        if row["name"].startswith("LFPS"):
            assert 0.015 < row["read"] < 0.05  # a fiftieth, with first and last keys
            assert row["scored"] >= row["read"]
    for name in CHOSEN[:-1]:
        one, two = ([row for row in rows if (row["name"], row["parts"]) == (name, parts)][-1] for parts in (1, 2))
        for key in ("read", "scored", "right", "like_dense"):
            assert one[key] == two[key]


def test_bytes_are_those_of_lists_bounds_and_tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        import index_bytes

        found = index_bytes.rows(4096, heads=8, kv_heads=2, dim=64, again=0.25)
    assert found["dense"] == {"keys": 2 * 4096 * 128, "values": 2 * 4096 * 128}
    assert found["Quest, a list a head"] == {
        "choosing": 2 * 256 * 2 * 128,
        "keys": 8 * 80 * 128,
        "values": 8 * 80 * 128,
    }
    assert found["Quest, a list a KV head, codes"]["choosing"] == 2 * 256 * (64 + 8) + 0.25 * 2 * 256 * 256
    one, each = found["LFPS, a list a KV head"], found["LFPS, a list a head"]
    for lists, parts in ((2, one), (8, each)):
        assert 0.055 < parts["keys"] / (lists * 4096 * 128) < 0.063
        assert 0.02 < parts["values"] / (lists * 4096 * 128) < 0.024
        candidates = parts["keys"] / 128 - lists * 10
        assert candidates / 16 <= parts["learning"] / 256 <= candidates  # a line holds 1 to 16 of a table's entries
        assert parts["choosing"] >= 2 * lists * 256 * 4 + parts["learning"] / 2


def test_moving_and_choosing_are_timed(tmp_path_factory):
    options = "--shapes S --contexts 1024 2048 --batches 1 2 --repeats 2 --device cpu"
    rows, table = ran(tmp_path_factory, "index_times", options.split())
    moved = [row for row in rows if row["what"] == "transfer"]
    assert [row["mib"] for row in moved] == [row["batch"] * row["context"] * 3 * 64 * 2 / 4 / 2**20 for row in moved]
    chosen = [row for row in rows if row["what"] == "index"]
    assert {row["method"]: 0.04 < row["read"] < 0.06 for row in chosen} == dict.fromkeys(
        ("exact top-k", "LFPS", "LFPS, a list a KV head", "Quest, a list a head", "Quest, a list a KV head"), True
    )
    assert all(row["reading_ms"] > 0 for row in chosen)
    assert len(table.splitlines()) == 2 + len(moved) + 1 + 2 + 2
