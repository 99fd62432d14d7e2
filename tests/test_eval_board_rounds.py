"""Boards that are cut short: rounds of samples, budgets in keys, and drift where answers cannot be compared."""

from __future__ import annotations

import json

import pytest
from board_helpers import always_right, run  # noqa: F401 - one is a fixture

from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError
from saccade.eval.board import grid as grids
from saccade.eval.board.drifts import Drifts
from saccade.eval.board.jobs import Placed, asked, jobs, settled, unfinished
from saccade.eval.setting import load
from saccade.methods.policy import Policy


def lines(file) -> int:
    return len(file.read_text().splitlines())


@pytest.mark.usefixtures("always_right")
def test_every_method_answers_a_round_before_any_answers_more(tmp_path, tiny_llama, capsys):
    out = tmp_path / "out"
    command = [
        *("eval", "board", "--model", tiny_llama, "--method", "streaming", "--method", "quest", "-t", "natural:facts"),
        *("--length", 1024, "--keys", 256, "--keys", 384, "--samples", 3, "--protocol", "B", "--recall", 0),
        *("--dtype", "float32", "--kv-memory", "16MiB", "--drift", 4, "--out", out),
    ]
    assert run(*command, "--limit", 1, "--limit", 3) == 0
    said = [line.split(" ")[0] for line in capsys.readouterr().err.splitlines() if "of 1 settings" in line]
    assert said == 2 * ["dense", "streaming", "quest", "streaming", "quest"]
    assert {lines(file) for file in out.glob("results/*/predictions.jsonl")} == {3}
    data = json.loads((out / "board.json").read_text())
    assert {row["budget"] for row in data["rows"]} == {0.25, 0.375}
    assert all(row["n"] == 3 and row["kl"] for row in data["rows"])
    assert "not finished" not in (out / "board.md").read_text()
    assert run("eval", "board", "--join", out, "--out", tmp_path / "joined") == 0
    assert json.loads((tmp_path / "joined" / "board.json").read_text())["rows"] == data["rows"]
    for words, why in (
        (["--budget", 0.1], "keys=256, 384: give either budgets or keys"),
        (["--length", 512], "keys=256, 384: give either budgets or keys"),
        (["--keys", 1024], "keys=1024 must be above 0 and below the length, 1024 tokens"),
        (
            ["--without", "psa"],
            "without='psa' is no row of this board; its rows: 'streaming', 'streaming, prefill', 'quest'",
        ),
        (["--without", "quest", "--without", "streaming", "--without", "streaming, prefill"], "leaves no row"),
    ):
        assert run(*command, *words) == 2
        assert why in " ".join(capsys.readouterr().err.split())


def test_drift_ranks_methods_where_dense_attention_answers_too_badly(tmp_path, tiny_llama, capsys):
    """Random weights answer nothing."""
    out = tmp_path / "out"
    command = [
        *("eval", "board", "--model", tiny_llama, "--method", "streaming", "-t", "natural:facts", "--length", 1024),
        *("--keys", 256, "--samples", 2, "--protocol", "B", "--recall", 0, "--dtype", "float32"),
        *("--kv-memory", "16MiB", "--drift", 4, "--out", out),
    ]
    assert run(*command) == 0
    assert "Dense attention scores 0.0 of 100 here, below half" in capsys.readouterr().err
    assert [folder.name.split("__")[1] for folder in out.glob("results/*__*")] == ["dense"]  # nothing more is answered
    (row,) = json.loads((out / "board.json").read_text())["rows"]
    assert row["matched"]
    assert row["kl"][0] > 0
    assert row["n"] == 0
    page = (out / "board.md").read_text()
    assert "Dense attention scores 0.0 of 100 here" in page
    assert "not finished" not in page


def test_what_a_later_round_did_not_reach_stays_and_what_was_not_answered_is_unfinished(tmp_path):
    grid = grids.FIXED.changed([0.1], [256], ["B"], methods=["quest"], drift=4)
    todo = jobs(grid, {256: tmp_path}, (1, 5))
    assert [(name, budget) for name, _, _, budget in asked(todo)] == [("dense", None), ("quest", 0.1)]
    assert [job.limit for job in todo] == [1, 1, 5, 5]
    dense = Placed("dense", "B", 256, None, "dense", tmp_path)
    first = Placed("quest", "B", 256, 0.1, "quest", tmp_path / "quest", None, tmp_path / "drift")
    cut = Placed("quest", "B", 256, 0.1, "quest", None, None, tmp_path / "drift")
    assert settled([dense, first, cut]) == [dense, first]
    assert settled([dense, cut, first]) == [dense, first]
    assert unfinished([dense, first], todo, True) == 0
    assert unfinished([dense, cut], todo, True) == 1
    assert unfinished([dense, cut], todo, False) == 0
    assert unfinished([Placed("dense", "B", 256, None, "dense", None, "too weak"), cut], todo, True) == 0
    budgets = grids.FIXED.changed(lengths=[1024], keys=[512, 128, 256], protocols=["B"], methods=["quest"], drift=4)
    assert [job.budgets[0] for job in jobs(budgets, {1024: tmp_path})] == [None, 0.25, 0.125, 0.5]  # the middle first


def test_what_a_prefill_reads_does_not_hang_on_what_another_run_left(tmp_path, tiny_llama):
    """Prefills alike share chunks; what is counted is a whole one."""
    config = EngineConfig(str(tiny_llama), dtype="float32", kv_memory="16MiB", prefill_chunk=64)
    with load(config) as llm:
        drifts = Drifts(llm, config, tmp_path, 640, 4)
        policies = [
            Policy.parse({"prefill": "streaming(sinks=4, window=48)", "decode": f"topk(k={k})"}) for k in (0.2, 0.4)
        ]
        one, other = (drifts.of(policy) for policy in policies)
    assert one.keys("prefill") == other.keys("prefill") < 0.6
    assert one.keys("decode") != other.keys("decode")


def test_keys_are_shares_of_one_length():
    grid = grids.FIXED.changed(lengths=[4096], keys=[128, 512])
    assert grid.budgets == (0.03125, 0.125)
    with pytest.raises(RequestError, match="one --length"):
        grids.FIXED.changed(keys=[128])
