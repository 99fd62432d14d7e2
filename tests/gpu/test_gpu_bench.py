"""``saccade bench generate`` and ``ttft`` on a GPU time whole calls, which run as they do for users."""

from __future__ import annotations

import json

import pytest

from saccade.cli.main import main
from saccade.engine.worker import Worker

METHODS = ("transformers", "dense", "quest", "lfps(unit=kv_head)")
PARTS = ("attention", "selection", "linear", "rest")


def rows_of(tmp_path, *args: str) -> list[dict]:
    file = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *args, "--contexts", "700", "--json", str(file)])
    assert exit_info.value.code == 0
    facts = json.loads(file.read_text())
    assert facts["machine"]["gpu"]
    return facts["rows"]


def test_decode_steps_are_recorded_ones(tmp_path, monkeypatch):
    steps = []
    plain = Worker.run

    def run(self, step, *args, **options):
        steps.append(self.setting.watch.idle)
        return plain(self, step, *args, **options)

    monkeypatch.setattr(Worker, "run", run)
    rows = rows_of(tmp_path, "generate", "--synthetic-kv", "--tokens", "6", "--methods", ";".join(METHODS))
    assert [row["method"] for row in rows] == list(METHODS)
    assert len(steps) > 3 * 20
    assert all(steps)  # nobody looks on, for whom a step would leave its recording
    for row in rows:
        assert (row["device"], row["tokens"]) == ("cuda", 6)
        assert [row[f"{part}_ms"] for part in PARTS] == [None] * 4
        assert 0 < row["floor_ms"] < row["ms_per_token"]
    assert all(row["backends"] == ["triton"] for row in rows[1:])


def test_first_tokens(tmp_path):
    rows = rows_of(tmp_path, "ttft", "--methods", "transformers;dense;flexprefill")
    for row in rows:
        assert row["device"] == "cuda"
        assert row["seconds"] > 0
        assert [row[f"{part}_s"] for part in PARTS] == [None] * 4
