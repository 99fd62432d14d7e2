"""The board: settings that read alike, what is lost between them, and a page of every row, the least lost first."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from itertools import pairwise
from math import exp, log
from pathlib import Path

import pytest
from board_helpers import always_right, run  # noqa: F401 - one is a fixture
from test_eval_report import config, row, write
from tiny_models import one_thread  # noqa: F401 - a fixture

from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError
from saccade.eval.board import grid as grids
from saccade.eval.board.entries import ENTRIES, EXCLUDED, KINDS, entry_named
from saccade.eval.board.equal import equal_bytes, equal_drift, equal_recall
from saccade.eval.board.jobs import Job, Placed, jobs, prepare_data
from saccade.eval.board.kept import joined, keep, settings
from saccade.eval.board.page import write_board
from saccade.eval.board.pictures import look
from saccade.eval.board.play import Play, _known, check_like, play
from saccade.eval.board.rows import fold
from saccade.eval.samples import write_jsonl
from saccade.eval.setting import load
from saccade.methods.registry import AROUND, METHODS, MODIFIERS


def test_every_registered_method_is_ranked_or_says_why_not():
    ranked = set().union(*(entry.methods for entry in ENTRIES))
    assert ranked | EXCLUDED.keys() == {*METHODS, *MODIFIERS, *AROUND}
    assert not ranked & EXCLUDED.keys()
    fixed = [entry for entry in grids.FIXED.entries if entry.kind in ("method", "baseline") and entry.dial]
    assert len(set().union(*(entry.methods for entry in fixed))) >= 20
    assert {"oracle", "lossless", "certified"} <= {entry.kind for entry in grids.FIXED.entries} <= set(KINDS)
    assert (len(grids.FIXED.budgets), grids.FIXED.lengths, grids.FIXED.protocols, grids.FIXED.samples) == (
        3, (4096, 16384), ("B", "D"), 4,
    )  # fmt: skip


@pytest.mark.parametrize("length", [256, 16384])
def test_every_setting_of_a_dial_is_a_policy_that_serves_its_protocol(length):
    for entry in ENTRIES:
        for letter in filter(entry.serves, "BD"):
            values = [None] if entry.dial is None else entry.dial.values(length)
            policies = {entry.policy(letter, 0.1, value).text for value in values}
            assert len(policies) == len(values) == len(set(values))
            if letter == "B":
                assert all(
                    entry.policy(letter, 0.1, value).prefill.name == "dense" for value in (values[0], values[-1])
                )
        assert entry.serves("B") or entry.serves("D")


def test_jobs_travel_to_workers():
    """Side by side, each row runs in a process of its own."""
    data = {length: Path("data") for length in grids.FIXED.lengths}
    todo = jobs(grids.FIXED, data)
    assert pickle.loads(pickle.dumps(todo)) == todo
    what = Play(grids.FIXED, EngineConfig("reference"), Path("results"))
    assert pickle.loads(pickle.dumps(what)) == what


def test_no_two_rows_share_a_marker():
    looks = [look(entry.name) for entry in ENTRIES]
    assert len({(one["marker"], one["markerfacecolor"] == "none") for one in looks}) == len(ENTRIES)


# (row, budget) -> keys attended of 1000, scores of the eight samples
MADE = {
    ("quest", 0.1): (100, [1, 1, 1, 1, 1, 1, 1, 0]),
    ("quest", 0.25): (250, [1] * 8),
    ("snapkv", 0.1): (104, [1, 0, 0, 1, 0, 0, 0, 0]),
    ("snapkv", 0.25): (240, [1, 0, 1, 1, 0, 0, 0, 0]),
    ("topk", 0.1): (98, [1] * 8),
    ("topk", 0.25): (252, [1] * 8),
    ("cis", 0.1): (300, [1] * 8),  # could not be set to read less
    ("cis", 0.25): (300, [1] * 8),
    ("lossless", None): (600, [1] * 8),
}


@pytest.fixture
def made(tmp_path) -> list[Placed]:
    """Results of five rows at two budgets and one length, as a run leaves them."""
    placed = []
    for (name, budget), (attended, scores) in {("dense", None): (1000, [1] * 8), **MADE}.items():
        folder = tmp_path / f"{name}-{budget}"
        settings = config(f"{name}(at={budget})" if name != "dense" else name, "B")
        write(folder, settings, [row("one", at, score, attended, protocol="B") for at, score in enumerate(scores)])
        (folder / "recall.json").write_text(json.dumps({"samples": 1, "decode": attended / 1000 + 0.6}))
        placed.append(Placed(name, "B", 2048, budget, settings["policy"], folder))
    return placed


GRID = grids.Grid((0.1, 0.25), (2048,), ("B",))


def test_rows_are_sorted_by_what_is_lost_and_only_those_that_read_alike_are_ranked(made):
    rows = fold(made, [2048])
    at_tenth = [(one.entry.name, one.matched) for one in rows if one.budget == 0.1]
    assert at_tenth == [("topk", True), ("quest", True), ("snapkv", True), ("cis", False)]
    assert [one.entry.name for one in rows if one.budget == 0.25] == ["quest", "topk", "snapkv", "cis"]
    quest = next(one for one in rows if (one.entry.name, one.budget) == ("quest", 0.1))
    assert quest.loss.mean == pytest.approx(-1 / 8)
    assert quest.loss.low < -1 / 8 < quest.loss.high <= 0
    assert quest.keys == pytest.approx(0.1)
    assert quest.read == pytest.approx((2 * 100 + 40) / 2000)  # 40 keys scored exactly, no summaries counted
    assert quest.recall == pytest.approx(0.7)
    partly = [Placed(**{**vars(one), "length": 4096}) for one in made if one.name == "dense"]
    rows = fold([*made, *partly], [2048, 4096])
    assert not any(one.matched or one.complete for one in rows)  # every row lacks a length


def test_equal_bytes_and_equal_recall_lie_between_settings(made):
    rows = fold(made, [2048])
    found = equal_bytes(rows, "B", [0.2, 0.9])
    assert [one.entry.name for one in found[0.2]] == ["topk", "quest", "snapkv"]  # cis never reads so little
    assert found[0.9] == []
    topk, quest, _ = found[0.2]
    place = log(0.2 / 0.12) / log(0.27 / 0.12)  # quest reads 240 and 540 of 2000
    assert quest.keys == pytest.approx(exp((1 - place) * log(0.1) + place * log(0.25)))
    assert quest.loss.mean == pytest.approx(-(1 - place) / 8)
    assert topk.loss.mean == 0
    (eighty, *_) = equal_recall(rows, "B").values()
    assert {one.entry.name for one in eighty} == {"topk", "quest", "snapkv"}  # cis: no two settings enclose it
    assert all(left.keys <= right.keys for left, right in pairwise(eighty))


def test_keys_at_equal_drift_lie_between_settings(made, tmp_path):
    """In the logarithms of KL and keys; what is lost there with them. Rows around no level are out."""

    def drifting(one: Placed, kl: float, keys: float) -> Placed:
        file = tmp_path / f"{one.name}-{one.budget}.json"
        phases = {
            "decode": {"density": keys, "reads": keys, "seconds": 3.0},
            "prefill": {"density": 1.0, "seconds": 0.0},
        }
        seconds = {"dense_seconds": {"decode": 2.0, "prefill": 0.0}}
        record = {"policy": one.policy, "kl": [kl / 2, 3 * kl / 2], "agree": [1.0, 0.0], **phases, **seconds}
        file.write_text(json.dumps(record))
        return replace(one, drift=file)

    measured = {("quest", 0.1): (0.04, 0.1), ("quest", 0.25): (0.004, 0.25), ("topk", 0.1): (0.015, 0.1)}
    measured |= {("topk", 0.25): (0.001, 0.25), ("snapkv", 0.1): (0.9, 0.1), ("snapkv", 0.25): (0.5, 0.25)}
    placed = [
        drifting(one, *measured[one.name, one.budget]) if (one.name, one.budget) in measured else one for one in made
    ]
    rows = fold(placed, [2048])
    found = equal_drift(rows, "B")
    assert {x: [one.entry.name for one in ones] for x, ones in found.items()} == {
        0.005: ["topk", "quest"], 0.01: ["topk", "quest"], 0.02: ["quest"], 0.05: [],
    }  # fmt: skip
    (quest,) = found[0.02]
    place = log(0.02 / 0.004) / log(0.04 / 0.004)
    assert quest.keys == pytest.approx(exp(place * log(0.1) + (1 - place) * log(0.25)))
    assert quest.loss.mean == pytest.approx(-place / 8)
    row = next(one for one in rows if (one.entry.name, one.budget) == ("quest", 0.1))
    assert (row.kl.mean, row.agree, row.time) == (pytest.approx(0.04), 0.5, 1.5)
    page, plain, markdown = (file.read_text() for file in write_board(placed, GRID, tmp_path / "out"))
    assert page.count("<figure>") == 4  # drift beside keys, bytes and recall
    assert "| KL, nats [95 %] | tokens that agree | time, of dense's |" in markdown
    assert {one["method"] for one in json.loads(plain)["equal"]["drift"]} == {"topk", "quest"}


def test_families_of_tasks_have_columns_and_low_tasks_are_left_out(tmp_path):
    """Tasks that dense attention does to less than half count nowhere, and are named."""
    placed = []
    for name, budget, facts, long, low in (("dense", None, 1, 1, 0), ("quest", 0.1, 1, 0, 1), ("topk", 0.1, 0, 1, 1)):
        folder = tmp_path / name
        settings = config(f"{name}(at={budget})" if budget else name, "B")
        scores = [("natural:facts", facts), ("long:sorting", long), ("long:copying", low)]
        write(folder, settings, [row(task, at, score, 100, protocol="B") for task, score in scores for at in range(4)])
        placed.append(Placed(name, "B", 2048, budget, settings["policy"], folder))
    rows = {one.entry.name: one for one in fold(placed, [2048])}
    lost = {name: {kind: loss.mean for kind, loss in one.families.items()} for name, one in rows.items()}
    assert lost == {"quest": {"facts": 0.0, "long": -1.0}, "topk": {"facts": -1.0, "long": 0.0}}
    assert [one.loss.n for one in rows.values()] == [8, 8]
    markdown = write_board(placed, grids.Grid((0.1,), (2048,), ("B",)), tmp_path / "out")[2].read_text()
    assert "| method | points lost [95 %] | facts | long | keys read |" in markdown
    assert "Left out, as dense attention does less than half of them: long:copying (0)." in markdown


def test_the_page_holds_every_row_in_order_and_nothing_from_outside(made, tmp_path):
    failed = Placed("infinigen", "B", 2048, 0.1, "infinigen", None, "<b>no</b> calibration; run saccade calibrate")
    files = write_board([*made, failed], GRID, tmp_path / "out", "saccade eval board --quick", missing=2)
    page, plain, markdown = (file.read_text() for file in files)
    shown = [name.strip() for name in re.findall(r'<td class="label who"[^>]*>(?:<i [^>]*></i>)?([^<\n]+)', page)]
    assert shown[:10] == [
        *("topk", "quest", "snapkv", "cis", "infinigen"),
        *("quest", "topk", "snapkv", "cis"), "lossless",
    ]  # fmt: skip
    data = json.loads(plain)
    listed = [one["method"] for budget in (0.1, 0.25, None) for one in data["rows"] if one["budget"] == budget]
    assert listed == shown[:10]
    assert data["rows"][1]["lengths"]["2048"]["policy"] == "topk(at=0.1)"
    assert re.findall(r"^\| `([\w ,]+)`", markdown, re.MULTILINE)[:10] == shown[:10]
    assert "| `quest` | 12.5 [0.0, 37.5] |" in markdown
    assert page.count("<figure>") == page.count("<svg") == 3  # keys, bytes, recall
    assert not re.search(r"(src|href)=(?![\"']?(data:|#))|url\((?!#|data:)|@import|<script|<link", page)
    assert "2 settings are not finished" in page
    assert "&lt;b&gt;no&lt;/b&gt; calibration" in page
    assert "<b>" not in page
    assert page.count("off the budget") == 2  # cis, twice


def test_every_run_that_rows_come_from_is_named(made, tmp_path):
    def says(placed):
        markdown = write_board(placed, GRID, tmp_path / "out")[2].read_text()
        return markdown.partition("Points lost")[0]

    alone = says(made)
    assert "8 samples a length; saccade" in alone
    assert "several runs" not in alone
    for number, one in enumerate(made[1:4]):  # two settings of another commit, and one that another machine finished
        file = one.folder / "config.json"
        stored = json.loads(file.read_text())
        if number < 2:
            stored["commit"] = "abcdef0123456789+changes"
            rows = (one.folder / "scores.jsonl").read_text().splitlines(keepends=True)
            (one.folder / "scores.jsonl").write_text("".join(rows[:5]))
        else:
            environment = {name: stored[name] for name in ("versions", "commit")}
            stored["continued_with"] = [
                {**environment, "machine": {"processor": "Tortoise", "cores": 3, "gpu": "Hare"}}
            ]
        file.write_text(json.dumps(stored))
    mixed = says(made)
    assert "5 to 8 samples a length. Rows come from several runs" in mixed
    assert "2 of B: saccade" in mixed
    assert "at abcdef012345 with changes" in mixed
    assert "1 of B: saccade" in mixed
    assert "; Hare (Tortoise, 3 cores)" in mixed
    assert f"{len(made) - 2} of B: saccade" in mixed


def test_boards_that_were_run_apart_become_one(made, tmp_path):
    """A row that failed in one and ran in another counts once, as run; what neither finished is missing."""
    data = {2048: tmp_path / "data"}
    entries = {
        name: [job for job in jobs(GRID, data) if job.entry and job.entry.name == name]
        for name in (one.name for one in ENTRIES)
    }
    failed = [replace(one, folder=None, error="no room") if one.name == "quest" else one for one in made[:3]]
    slices = {
        "a": (failed, jobs(GRID, data)[:1] + entries["quest"]),
        "b": (made[1:], [job for name in ("quest", "snapkv", "topk", "cis", "lfps") for job in entries[name]]),
    }
    for name, (placed, todo) in slices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results").symlink_to(tmp_path)
        keep(tmp_path / name, placed, todo, GRID, f"saccade {name}")
    placed, grid, missing, commands = joined([tmp_path / "a", tmp_path / "b"])
    assert [(one.name, one.budget, one.error) for one in placed] == [(one.name, one.budget, None) for one in made]
    assert (grid.budgets, grid.lengths, grid.protocols) == ((0.1, 0.25), (2048,), ("B",))
    assert (missing, commands) == (2, "saccade a; saccade b")  # lfps at two budgets
    assert [row.as_dict() for row in fold(placed, [2048])] == [row.as_dict() for row in fold(made, [2048])]


def test_without_matplotlib_the_tables_are_whole(made, tmp_path, monkeypatch):
    whole = write_board(made, GRID, tmp_path / "whole")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    files = write_board(made, GRID, tmp_path / "out")
    assert "<svg" not in files[0].read_text()
    assert "matplotlib is not installed" in files[0].read_text()
    assert files[0].read_text().count("<tr") == whole[0].read_text().count("<tr")
    assert [file.read_text() for file in files[1:]] == [file.read_text() for file in whole[1:]]


def test_no_board_where_dense_attention_scores_below_half(tmp_path, tiny_llama, made, capsys):
    """Said as soon as dense has run, with the tasks and a way out; and of boards that are joined."""
    command = [
        *("eval", "board", "--quick", "--model", tiny_llama, "--method", "quest", "-t", "single", "--length", 256),
        *("--samples", 1, "--protocol", "B", "--dtype", "float32", "--kv-memory", "8MiB", "--out", tmp_path / "out"),
    ]
    assert run(*command) == 2
    said = capsys.readouterr().err
    assert "no board can be made" in said
    assert "256 tokens, protocol B" in said
    assert "Dense attention scores 0.0 of 100 here, below half" in said
    assert "Tasks below half: single 0.0. Take a model that can do these tasks, or tasks that this one can do" in said
    assert [folder.name.split("__")[1] for folder in (tmp_path / "out" / "results").iterdir()] == ["dense"]
    assert not (tmp_path / "out" / "board.html").exists()

    dense = made[0].folder
    rows = [row("one", at, float(at < 4), 1000, protocol="B") for at in range(8)]
    write_jsonl(dense / "scores.jsonl", rows)
    assert write_board(made, GRID, tmp_path / "half")  # exactly half is no weakness
    write_jsonl(dense / "scores.jsonl", [row("one", at, float(at < 3), 1000, protocol="B") for at in range(8)])
    with pytest.raises(RequestError, match=r"\(2048 tokens, protocol B\): Dense attention scores 37.5 of 100"):
        write_board(made, GRID, tmp_path / "below")
    assert not (tmp_path / "below").exists()


@pytest.mark.usefixtures("always_right")
def test_three_methods_of_a_users_checkpoint_are_ranked_and_a_cut_run_goes_on(tmp_path, tiny_llama, capsys):
    out = tmp_path / "out"
    command = [
        *("eval", "board", "--quick", "--model", tiny_llama, "--method", "streaming", "--method", "topk"),
        *("--method", "quest", "-t", "single", "--length", 256, "--budget", 0.2, "--samples", 2, "--protocol", "B"),
        *("--dtype", "float32", "--kv-memory", "8MiB", "--out", out),
    ]
    assert run(*command, "--seconds", 1e-9) == 2
    assert "nothing of the board is finished" in capsys.readouterr().err
    assert run(*command, "--limit", 1) == 0
    first = {file.parent.name: file.read_bytes() for file in out.glob("results/*/predictions.jsonl")}
    assert run(*command) == 0
    last = {file.parent.name: file.read_bytes() for file in out.glob("results/*/predictions.jsonl")}
    assert all(last[name].startswith(text) for name, text in first.items())
    assert any(last[name] != text for name, text in first.items())
    # Contexts that one setting computed are there for the next one: all tokens but those of the last, partial block.
    for file in out.glob("results/*topk*/predictions.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            assert line["turns"][0]["cached_tokens"] > 200
    times = {file: file.read_bytes() for file in out.glob("results/*/timings.jsonl")}
    page = (out / "board.html").read_text()
    assert run(*command, "--seconds", 1e-9) == 0  # late, but all of it lies there
    assert "not finished" not in (out / "board.html").read_text()
    assert (out / "board.html").read_text() == page  # and the command is the same without its slice
    assert run(*command) == 0
    assert {file: file.read_bytes() for file in out.glob("results/*/timings.jsonl")} == times  # nothing ran again
    assert (out / "board.html").read_text() == page
    assert run("eval", "board", "--join", out, "--out", tmp_path / "joined") == 0
    assert (tmp_path / "joined" / "board.html").read_text() == page
    assert run("eval", "board", "--join", tmp_path, "--out", tmp_path / "joined") == 2
    assert "has no placed.json; give the --out of a board" in capsys.readouterr().err
    data = json.loads((out / "board.json").read_text())
    ranked = {(one["method"], one["protocol"], one["budget"]) for one in data["rows"] if one["matched"]}
    assert ranked == {(name, "B", 0.2) for name in ("streaming", "topk", "quest")}
    assert len(data["rows"]) == 3
    assert all(0 < one["recall"] <= 1 for one in data["rows"])
    assert str(tmp_path) not in page


@pytest.mark.usefixtures("always_right")
def test_prefill_methods_are_matched_by_what_their_prefill_reads(tmp_path, tiny_llama):
    model = EngineConfig(str(tiny_llama), dtype="float32", kv_memory="8MiB")
    grid = grids.QUICK.changed(
        [0.3], [256], ["D"], tasks=["single"], recall=0, methods=["streaming, prefill", "tri_shape"]
    )
    data = prepare_data(grid, str(tiny_llama), tmp_path / "data")
    todo = jobs(grid, data)
    assert [job.entry and job.entry.name for job in todo] == [None, "streaming, prefill", "tri_shape"]
    placed = [one for ones in play(todo, load(model), Play(grid, model, tmp_path), note=str) for one in ones]
    rows = {row.entry.name: row for row in fold(placed, [256])}
    for name in ("streaming, prefill", "tri_shape"):
        (part,) = rows[name].parts.values()
        assert rows[name].matched
        assert part.cell.density("prefill") == pytest.approx(0.3, rel=0.12)
        assert part.policy.endswith("topk(k=0.3)")
        assert part.cell.run.protocol == "D"


@pytest.mark.usefixtures("always_right")
def test_the_default_policy_has_a_row(tmp_path, tiny_llama):
    """At 256 tokens it is dense, and nothing is timed."""
    model = EngineConfig(str(tiny_llama), dtype="float32", kv_memory="16MiB")
    grid = grids.QUICK.changed([0.3], [256], tasks=["single"], recall=0, methods=["auto"])
    todo = jobs(grid, prepare_data(grid, str(tiny_llama), tmp_path / "data"))
    assert [(job.entry and job.entry.name, job.protocol) for job in todo] == [
        (None, "B"), (None, "D"), ("auto", "D"),
    ]  # fmt: skip
    placed = [one for ones in play(todo, load(model), Play(grid, model, tmp_path), note=str) for one in ones]
    assert [one.error for one in placed] == [None] * 3
    (row,) = fold(placed, [256])
    (part,) = row.parts.values()
    assert [one["error"] for one in part.cell.rows] == [None]
    assert (part.policy, part.keys, row.loss.mean) == ("auto", 1.0, 0.0)
    assert KINDS[row.entry.kind]


@pytest.mark.usefixtures("always_right")
def test_dials_are_turned_by_drift_and_families_have_as_many_samples(tmp_path, tiny_llama, capsys):
    out = tmp_path / "out"
    command = [
        *("eval", "board", "--model", tiny_llama, "--method", "streaming", "--method", "quest", "--recall", 0),
        *("-t", "single", "-t", "multikey", "--length", 640, "--budget", 0.3, "--budget", 0.5, "--protocol", "B"),
        *("--dtype", "float32", "--kv-memory", "16MiB", "--drift", 12, "--each", 3, "--out", out),
    ]
    assert run(*command, "--no-answers") == 0
    drifts = {file.name: file.read_bytes() for file in out.glob("results/drift/640-12/*.json")}
    assert not list(out.glob("results/*/predictions.jsonl"))
    assert len(drifts) >= 4
    alone = json.loads((out / "board.json").read_text())
    assert [(one["budget"], one["matched"], one["kl"] is not None) for one in alone["rows"]] == [
        (0.3, True, True), (0.3, True, True), (0.5, True, True), (0.5, True, True),
    ]  # fmt: skip
    for left, right in pairwise(alone["rows"]):
        assert left["budget"] < right["budget"] or left["kl"][0] <= right["kl"][0]
    for one in alone["rows"]:  # what begins another board's search, and what was read to choose
        (cell,) = one["lengths"].values()
        record = next(
            found for file in out.glob("results/drift/640-12/*.json")
            if (found := json.loads(file.read_text()))["policy"] == cell["policy"]
        )  # fmt: skip
        read = record["decode"]
        assert cell["keys"] == one["keys"] == read["density"]
        assert one["bytes"] == read["density"] + entry_named(one["method"]).summary * read["estimated"] / 2
        assert (one["bytes"] > one["keys"]) == (one["method"] == "quest")
    assert settings([out / "board.json"]) == {
        (one["method"], "B", 640, one["budget"]): one["lengths"]["640"]["policy"] for one in alone["rows"]
    }
    page = (out / "board.html").read_text()
    assert "no samples were answered" in page
    assert "KL, nats" in page
    assert page.count("<figure>") == 1
    assert run(*command) == 0
    assert {file.name: file.read_bytes() for file in out.glob("results/drift/640-12/*.json")} == drifts
    data = json.loads((out / "board.json").read_text())
    assert {(one["method"], one["budget"]) for one in data["rows"]} == {
        (name, budget) for name in ("streaming", "quest") for budget in (0.3, 0.5)
    }
    for file in out.glob("results/*/predictions.jsonl"):
        tasks = [json.loads(line)["task"] for line in file.read_text().splitlines()]
        assert tasks == ["single", "multikey"] * 2  # three of both together, rounded up


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--each", "0"], "each=0: must be an integer >= 1"),
        (["--each", "3", "--samples", "3"], "each=3: give it or samples"),
        (["--drift", "-1"], "drift=-1 must be"),
        (["--budget", "1.5"], "budget=1.5 must be above 0 and below 1"),
        (["--protocol", "C"], "protocol='C' is not on the board; known: B, D"),
        (["--method", "qest"], "method 'qest' is not on the board; known: .*quest"),
        (["--quick", "--full"], "different grids"),
        (["--samples", "0"], "samples=0 must be"),
        (["--limit", "0"], "limit=0 must be"),
        (["--recall", "-1"], "recall=-1 must be"),
        (["--together", "0"], "together=0 must be"),
        (["--seconds", "0"], "seconds=0.0 must be above 0"),
        (["--length", "8"], "length=8 must be an integer >= 64"),
        (["--task", "sinle"], "did you mean 'single'"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, capsys, words, says):
    assert run("eval", "board", *words, "--out", tmp_path / "out") == 2
    assert re.search(says, capsys.readouterr().err)
    assert not (tmp_path / "out" / "results").exists()


def test_a_search_begins_where_another_board_ended(made, tmp_path):
    """In the same protocol first, in the other one otherwise; what no dial has is left alone."""
    board = write_board(made, GRID, tmp_path)[1]
    known = settings([board, board])
    assert known == {
        (one.name, one.protocol, one.length, one.budget): one.policy for one in made if one.budget is not None
    }
    for job in jobs(grids.FIXED.changed(lengths=[2048]), {2048: board}):
        if job.entry is None or job.entry.dial is None:
            continue
        values = job.entry.dial.values(2048)
        other = "D" if job.protocol == "B" else "B"

        def at(job=job, values=values, **texts: str) -> int | None:
            like = {(job.entry.name, letter, 2048, 0.25): text for letter, text in texts.items()}
            return _known(job.entry, job, 0.25, values, Play(GRID, EngineConfig(), tmp_path, like=like))

        own = job.entry.policy(job.protocol, 0.25, values[3]).text
        assert at(**{job.protocol: own}) == 3
        assert at(**{job.protocol: "quest(budget=7)"}) is None
        if job.entry.serves(other):
            theirs = job.entry.policy(other, 0.25, values[5]).text
            assert at(**{other: theirs}) == 5
            assert at(**{other: theirs, job.protocol: own}) == 3


def test_settings_that_begin_no_search_are_refused(made, tmp_path):
    """A board without settings, and one of other budgets or lengths: neither is passed over in silence."""
    board = write_board(made, GRID, tmp_path)[1]
    data = json.loads(board.read_text())
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(data | {"rows": [row | {"lengths": {}} for row in data["rows"]]}))
    with pytest.raises(RequestError, match=r"bare\.json has no setting of any method"):
        settings([board, bare])
    entry = entry_named("quest")
    job = Job(entry, "B", 2048, board, (0.25,))

    def check(**key) -> None:
        at = {"name": "quest", "protocol": "B", "length": 2048, "budget": 0.25} | key
        like = {tuple(at.values()): entry.policy(at["protocol"], 0.25, entry.dial.values(2048)[2]).text}
        check_like([job], Play(GRID, EngineConfig(), tmp_path, like=like))

    check()
    check(protocol="D")
    check_like([job], Play(GRID, EngineConfig(), tmp_path))
    for other in ({"name": "locks"}, {"length": 4096}, {"budget": 0.5}):
        with pytest.raises(RequestError, match="no setting that this board asks for: it has budgets of 0"):
            check(**other)


@pytest.mark.parametrize("text", ["[]", '{"rows": 3}', '{"rows": [{"lengths": {"x": {}}}]}', "{"])
def test_a_file_that_is_no_board_is_refused(text, tmp_path):
    (tmp_path / "board.json").write_text(text)
    with pytest.raises(RequestError, match=r"board\.json"):
        settings([tmp_path / "board.json"])
