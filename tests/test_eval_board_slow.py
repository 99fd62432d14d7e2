"""Boards with a method that takes too long: it runs last, is cut short, and the next call goes on with it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from board_helpers import always_right, run  # noqa: F401 - one is a fixture

from saccade.engine.device.plans import DevicePlans
from saccade.engine.settings.config import EngineConfig
from saccade.engine.worker import Worker
from saccade.errors import RequestError
from saccade.eval.board import grid as grids
from saccade.eval.board import jobs as board_jobs
from saccade.eval.board import kept, play
from saccade.eval.board.jobs import Placed, jobs, settled, slow_last, unfinished, why_row_by_row
from saccade.eval.predict import take
from saccade.eval.runner import given_by, prepare
from saccade.eval.setting import Setting, load
from saccade.eval.workers import answers_in_order
from saccade.methods.policy import Policy
from saccade.models.interface import ModelSpec

SPEC = ModelSpec("llama", 24, 14, 2, 64, 1000, 40000, torch.bfloat16, (None,) * 24)


def on_a_gpu(policy: Policy) -> str | None:
    return DevicePlans(SPEC).of(policy, 100).why_not


@pytest.fixture
def slow(monkeypatch):
    """Seconds that every step takes beside its work, while there are some."""
    seconds, real = [], Worker.run

    def slowed(self, *args, **options):
        time.sleep(sum(seconds))
        return real(self, *args, **options)

    monkeypatch.setattr(Worker, "run", slowed)
    return seconds


def test_methods_that_decode_row_by_row_come_behind_all_budgets_and_rounds_of_the_others(tmp_path):
    names = ["topp", "quest", "twilight", "adakv", "rocketkv", "flexprefill"]
    grid = grids.FIXED.changed(lengths=[4096], keys=[128, 256], methods=names, drift=4)
    todo = jobs(grid, {4096: tmp_path}, (1, 5))
    found = slow_last(todo, on_a_gpu)
    assert sorted(map(repr, found)) == sorted(map(repr, todo))
    last = [job for job in todo if job.name in ("topp", "twilight")]
    assert found == [job for job in todo if job not in last] + last  # each part in the order in which it was
    assert {(job.name, job.limit) for job in last} == {(name, n) for name in ("topp", "twilight") for n in (1, 5)}
    assert slow_last(todo, lambda policy: None) == todo


def test_on_a_cpu_none_is_said_to_run_row_by_row(tiny_llama):
    with load(EngineConfig(str(tiny_llama), dtype="float32", kv_memory="16MiB")) as llm:
        assert why_row_by_row(llm, Policy.parse("twilight")) is None
    device = SimpleNamespace(why_not=on_a_gpu)
    other = SimpleNamespace(engine=SimpleNamespace(worker=SimpleNamespace(device=device)))
    assert why_row_by_row(other, Policy.parse("rocketkv(budget=256)")) is None
    assert "no batched kernel prunes the keys of chosen blocks" in why_row_by_row(other, Policy.parse("twilight"))


@pytest.mark.usefixtures("always_right")
@pytest.mark.parametrize("together", [1, 2])
def test_a_setting_that_takes_too_long_is_cut_keeps_its_answers_and_goes_on(
    tmp_path, tiny_llama, capsys, monkeypatch, slow, together
):
    out, real = tmp_path / "out", play.predict
    command = [
        *("eval", "board", "--model", tiny_llama, "--method", "streaming", "--method", "quest", "-t", "natural:facts"),
        *("--length", 1024, "--keys", 256, "--samples", 4, "--protocol", "B", "--recall", 0, "--dtype", "float32"),
        *("--kv-memory", "16MiB", "--drift", 4, "--together", together, "--out", out, "--limit", 3, "--limit", 4),
    ]

    def predict(data, llm, model, setting, results, *, progress, **options):
        """Quest's first sample is fast, the others are not."""

        def then(done, whole):
            slow[:] = [2.0] if setting.policy.decode.name == "quest" else []
            progress(done, whole)

        try:
            return real(data, llm, model, setting, results, progress=then, **options)
        finally:
            slow.clear()

    monkeypatch.setattr(play, "predict", predict)
    assert run(*command, "--most-seconds", 10) == 0
    said = capsys.readouterr().err
    assert "quest(budget=256, dense_layers=0): cut after 10 s; the same command goes on with it" in said
    assert "quest (B, 1024 tokens): 0 of 1 settings" in said  # in the round of four it is left alone
    data = json.loads((out / "board.json").read_text())
    rows = {row["method"]: row for row in data["rows"]}
    assert (rows["streaming"]["cut"], rows["streaming"]["n"], rows["streaming"]["matched"]) == (None, 4, True)
    assert (rows["quest"]["cut"], rows["quest"]["matched"]) == (10, False)
    assert 1 <= rows["quest"]["n"] < 3
    assert rows["quest"]["kl"] is not None
    assert [row["method"] for row in data["rows"]] == ["streaming", "quest"]
    page = (out / "board.md").read_text()
    assert "| cut after 10 s |" in page
    assert "1 settings are not finished" in page
    assert "--most-seconds" not in page
    # Of two boards that finished the same the whole one counts.
    placed, _, missing, _ = kept.joined([out])
    assert missing == 1
    assert {one.name: one.cut for one in placed} == {"dense": None, "streaming": None, "quest": 10}

    monkeypatch.setattr(play, "predict", real)
    assert run(*command, "--most-seconds", 1000) == 0
    rows = {row["method"]: row for row in json.loads((out / "board.json").read_text())["rows"]}
    assert (rows["quest"]["cut"], rows["quest"]["n"], rows["quest"]["matched"]) == (None, 4, True)
    assert "not finished" not in (out / "board.md").read_text()
    assert kept.joined([out])[2] == 0


@pytest.mark.usefixtures("always_right")
def test_a_dial_that_takes_too_long_leaves_a_row_without_rank(tmp_path, tiny_llama, capsys, monkeypatch):
    out, real = tmp_path / "out", play.Drifts.of

    def of(self, policy):
        time.sleep(3 if policy.decode.name == "quest" else 0)
        return real(self, policy)

    monkeypatch.setattr(play.Drifts, "of", of)
    command = [
        *("eval", "board", "--model", tiny_llama, "--method", "quest", "--method", "streaming", "-t", "natural:facts"),
        *("--length", 1024, "--keys", 300, "--samples", 1, "--protocol", "B", "--recall", 0, "--dtype", "float32"),
        *("--kv-memory", "16MiB", "--drift", 4, "--out", out, "--most-seconds", 2.5),
    ]
    assert run(*command) == 0
    rows = {row["method"]: row for row in json.loads((out / "board.json").read_text())["rows"]}
    assert (rows["quest"]["cut"], rows["quest"]["matched"], rows["quest"]["n"]) == (2.5, False, 0)
    assert rows["streaming"]["matched"]
    capsys.readouterr()
    assert run(*command[:-1], 0) == 2
    assert "most_seconds=0.0 must be above 0" in capsys.readouterr().err


def test_what_was_cut_is_unfinished_and_gives_way_to_what_was_not(tmp_path):
    grid = grids.FIXED.changed([0.1], [256], ["B"], methods=["quest"], drift=4)
    todo = jobs(grid, {256: tmp_path})
    dense = Placed("dense", "B", 256, None, "dense", tmp_path)
    whole = Placed("quest", "B", 256, 0.1, "quest", tmp_path / "quest", None, tmp_path / "drift")
    cut, unset = replace(whole, cut=5.0), replace(whole, folder=None, drift=None, cut=5.0)
    assert unfinished([dense, whole], todo, True) == 0
    assert unfinished([dense, cut], todo, True) == unfinished([dense, unset], todo, False) == 1
    assert settled([dense, whole, cut]) == [dense, cut]
    assert settled([dense, whole, unset]) == [dense, whole]
    for name, one in (("one", cut), ("other", whole)):
        placed = [replace(one, folder=tmp_path / name / "results" / "quest", drift=None)]
        kept.keep(tmp_path / name, placed, todo, grid, name)
    for folders in (("one", "other"), ("other", "one")):
        found = kept.joined([tmp_path / name for name in folders])
        assert [one.cut for one in found[0]] == [None]


@pytest.mark.parametrize("together", [1, 3])
def test_answers_end_when_their_time_is_over_and_the_engine_is_free(tmp_path, tiny_llama, slow, together):
    data = prepare(tmp_path, ["natural:facts"], [1024], 3, 0, name="data", given=given_by(str(tiny_llama)))
    config = EngineConfig(str(tiny_llama), dtype="float32", kv_memory="16MiB")
    samples, setting = list(take(data, None)), Setting(Policy(), "B")
    with load(config, together) as llm:
        whole = list(answers_in_order(samples, llm, config, setting, together=together))
        assert len(whole) == 3
        slow.append(1.0)
        began = time.monotonic()
        cut = list(answers_in_order(samples, llm, config, setting, together=together, until=began + 2))
        assert cut == []
        assert time.monotonic() - began < 12  # a sample takes more than 20 steps
        slow.clear()
        assert llm.loop.running == llm.loop.waiting == 0
        again = answers_in_order(samples, llm, config, setting, together=together, until=time.monotonic() + 600)
        said = [[turn["prediction"] for record, _ in answers for turn in record["turns"]] for answers in (again, whole)]
        assert said[0] == said[1] != []
        with pytest.raises(RequestError, match=r"workers=2 and until=1\.0, not both"):
            list(answers_in_order(samples, llm, config, setting, workers=2, until=1.0))


@pytest.mark.usefixtures("always_right")
def test_a_method_on_the_row_path_runs_last_with_few_samples_at_once(tmp_path, tiny_llama, capsys, monkeypatch):
    asked, real = {}, play.predict

    def why(llm, policy):
        return "no kernel" if policy.decode.name == "quest" else None

    def predict(data, llm, model, setting, results, *, together, **options):
        asked[setting.policy.decode.name] = together
        return real(data, llm, model, setting, results, together=together, **options)

    for module in (play, board_jobs):
        monkeypatch.setattr(module, "why_row_by_row", why)
    monkeypatch.setattr(play, "predict", predict)
    command = [
        *("eval", "board", "--model", tiny_llama, "--method", "quest", "--method", "streaming", "-t", "natural:facts"),
        *("--length", 1024, "--keys", 256, "--keys", 384, "--samples", 2, "--protocol", "B", "--recall", 0),
        *("--dtype", "float32", "--kv-memory", "16MiB", "--drift", 4, "--together", 8, "--out", tmp_path / "out"),
        *("--limit", 1, "--limit", 2),
    ]
    assert run(*command) == 0
    said = [line.split(" ")[0] for line in capsys.readouterr().err.splitlines() if "of 1 settings" in line]
    assert said == [*(2 * ["dense", "streaming", "streaming"]), *(4 * ["quest"])]
    assert asked == {"dense": 8, "streaming": 8, "quest": play.APART}
