"""The report: every row, paired with its dense twin, beside what it cost; and nothing from outside the page."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest

from saccade.errors import RequestError
from saccade.eval import plots
from saccade.eval.report import print_summary, write_report
from saccade.eval.runner import say_weak
from saccade.eval.samples import write_jsonl
from saccade.eval.stats import paired_difference
from saccade.eval.summary import Group, Run, depth_table, load_groups, position_scores
from saccade.eval.tables import OVERALL
from saccade.eval.weak import WAY_OUT, dense_score

SHAPE = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def config(policy: str, protocol: str = "A", **changes) -> dict:
    return {
        "model": {"name": "m", "path": "m", "weights_sha256": "w" * 64, "dtype": "bfloat16", "shape": SHAPE},
        "policy": policy,
        "protocol": protocol,
        "history": "self",
        "data": {"path": "d.jsonl", "sha256": "d" * 64, "name": "d", "seed": 0, "sources": {}},
        "versions": {"saccade": "1", "torch": "2", "python": "3"},
        "commit": "c" * 40,
        "machine": {"processor": "p", "cores": 2},
        **changes,
    }


def row(task: str, index: int, score: float | None, attended: int = 100, **more) -> dict:
    prefill = {"tokens": 50, "keys_attended": 2550, "keys_causal": 2550, "keys_scored": 0, "retrievals": 0}
    decode = {"tokens": 10, "keys_attended": attended, "keys_causal": 1000, "keys_scored": 40, "retrievals": 5}
    return {
        "id": f"{task}/{index}",
        "task": task,
        "length": more.pop("length", 2048),
        "index": index,
        "protocol": more.pop("protocol", "A"),
        "error": None if score is not None else "does not fit",
        "score": score,
        "turns": more.pop("turns", [{"score": score, "position": "end", "depth": None}]),
        "empty": more.pop("empty", 0),
        "prompt_tokens": 1900 + index,
        "notes": ["ran dense"] if index == 0 else [],
        "cost": {"prefill": prefill, "decode": decode} if score is not None else {"prefill": {}, "decode": {}},
    }


def write(folder: Path, settings: dict, rows: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    write_jsonl(folder / "scores.jsonl", rows)
    return folder


def test_the_report_says_how_multi_turn_sets_are_scored(tmp_path):
    for task, said in (("mtlb:samsum:end", True), ("single", False)):
        folder = write(tmp_path / task.replace(":", "-"), config("dense"), [row(task, 0, 0.4)])
        write_report([folder], folder / "out")
        for name in ("report.md", "report.html"):
            assert ("samsum is the exception" in (folder / "out" / name).read_text()) == said


@pytest.fixture
def results(tmp_path) -> Path:
    """Dense and two policies over two tasks; one sample of psa's does not fit, and its rows are in another order."""
    dense = [1, 1, 1, 0], [1, 0.5, 0.5, 1]
    psa = [1, None, 1, 0], [1, 0, 0.5, 0.5]
    for name, scores, attended in (("dense", dense, 1000), ("psa", psa, 100), ("topk(k=0.1)", dense, 100)):
        rows = [row("one", at, score, attended) for at, score in enumerate(scores[0])]
        rows += [row("two", at, score, attended, empty=int(score == 0)) for at, score in enumerate(scores[1])]
        write(tmp_path / "results" / name, config(name), rows[::-1] if name == "psa" else rows)
    return tmp_path / "results"


def test_samples_are_paired_by_id_with_dense(results):
    (group,) = load_groups([results])
    assert [run.policy for run in group.runs] == ["dense", "topk(k=0.1)", "psa"]
    cell = group.cell(group.runs[2])
    assert (cell.n, cell.paired, cell.errors, cell.empty) == (7, 7, 1, 1)
    assert cell.score == pytest.approx(4 / 7)
    assert cell.percent == pytest.approx(100 * 4 / 5)  # dense scores 5 of 7 on the samples that psa answered
    own, dense = [1, 1, 0, 1, 0, 0.5, 0.5], [1, 1, 0, 1, 0.5, 0.5, 1]
    assert cell.difference.mean == pytest.approx(-1 / 7)
    assert cell.difference.low == pytest.approx(paired_difference(own, dense).low, abs=0.03)
    assert cell.difference.low < -1 / 7 < cell.difference.high <= 0
    two = group.cell(group.runs[2], lambda one: one["task"] == "two")
    assert (two.n, two.score) == (4, 0.5)
    same = group.cell(group.runs[1])
    assert (same.difference.low, same.difference.high, same.percent) == (0, 0, 100)


def test_costs_by_hand(results):
    (group,) = load_groups([results])
    cell = group.cell(group.runs[2])
    assert cell.density("prefill") == 1.0
    assert cell.density("decode") == pytest.approx(0.1)
    assert cell.per_step("keys_attended") == pytest.approx(100 / (10 * 2))  # of each of two layers
    assert cell.per_step("retrievals") == pytest.approx(5 / (10 * 2))
    # per step: keys and values of 10 keys and keys of 4 more, 2 KV heads x 8 channels x 2 bytes
    assert cell.kv_bytes == pytest.approx((2 * 10 + 4) * 2 * 8 * 2)
    assert group.cell(group.runs[0]).density("decode") == 1.0


def test_mcnemar_counts_samples_that_only_one_side_answered_wholly(tmp_path):
    """Dense has eight right and a half; psa loses six of the eight and gains the half: p = 2 (1 + 7) / 2^7."""
    dense, psa = [1] * 8 + [0.5], [1, 1, 0, 0.9, 0.5, 0, 0, 0, 1]
    for name, scores in (("dense", dense), ("psa", psa)):
        write(tmp_path / name, config(name), [row("one", at, score) for at, score in enumerate(scores)])
    (group,) = load_groups([tmp_path])
    assert group.cell(group.runs[1]).chance == pytest.approx(2 * (1 + 7) / 2**7)
    assert group.cell(group.runs[0]).chance == 1.0
    _, markdown, _ = write_report([tmp_path], tmp_path / "out")
    (line,) = [line for line in markdown.read_text().splitlines() if line.startswith("| `psa`")]
    assert "| 0.12 |" in line


def test_the_retrieval_ratio_counts_heads_where_a_method_reuses(tmp_path):
    """Without counts of searches it is calls that scored, over steps and layers (2)."""
    rows = [row("one", 0, 1), row("one", 1, 1)]
    write(tmp_path / "psa", config("psa"), rows)
    for at, one in enumerate(rows):
        one["cost"]["decode"] |= {"searches": 3 + at, "searchable": 80}
    write(tmp_path / "cis", config("cis"), rows)
    (group,) = load_groups([tmp_path])
    ratios = {run.policy: group.cell(run).retrieval_ratio for run in group.runs}
    assert ratios == {"psa": pytest.approx(5 / (10 * 2)), "cis": pytest.approx(7 / 160)}


def test_a_sparse_prefill_is_compared_with_the_dense_one_of_its_prompts(tmp_path):
    """Protocol B's dense answers come from other steps, which round otherwise."""
    for order in (["B", "A"], ["A", "B"]):
        folders = [
            write(tmp_path / "".join(order) / letter, config("dense", letter), [row("one", 0, 1.0, protocol=letter)])
            for letter in order
        ]
        own = tmp_path / "".join(order) / "flex"
        folders += [write(own, config("flexprefill", "D"), [row("one", 0, 0.5, protocol="D")])]
        group = Group([Run.load(folder) for folder in folders])
        assert group.runs[-1].protocol == "D"
        assert group.baseline(group.runs[-1]).protocol == "A"
        assert group.baseline(group.runs[order.index("B")]).protocol == "B"
        assert Group(group.runs[:1] + group.runs[2:]).baseline(group.runs[-1]).protocol == order[0]


def test_the_baseline_is_dense_of_the_same_protocol_and_only_of_the_same_samples(tmp_path):
    for letter, score in (("A", 1.0), ("B", 0.5)):
        write(tmp_path / f"dense{letter}", config("dense", letter), [row("one", 0, score)])
    write(tmp_path / "psa", config("psa", "B"), [row("one", 0, 0.25, protocol="B")])
    write(tmp_path / "flex", config("flexprefill", "C"), [row("one", 0, 0.25, protocol="C")])
    (group,) = load_groups([tmp_path])
    percents = {run.policy: group.cell(run).percent for run in group.runs}
    assert percents == {"dense": 100, "flexprefill": 25, "psa": 50}
    write(tmp_path / "gold", config("psa", history="gold"), [row("one", 0, 0.25)])
    groups = load_groups([tmp_path])
    assert [len(one.runs) for one in groups] == [4, 1]
    assert groups[1].cell(groups[1].head).difference is None


def test_the_page_holds_every_row_and_nothing_from_outside(results, tmp_path):
    files = write_report([results], tmp_path / "out")
    page, markdown, table = (file.read_text() for file in files)
    for policy in ("dense", "psa", "topk(k=0.1)"):
        assert page.count(f"<td class=label>{policy}</td>") == 3  # overall and in two tasks
        assert markdown.count(f"| `{policy}` |") == 3
    assert page.count("<svg") == 1  # the frontier; no depths, one position
    assert not re.search(r"(src|href)=(?![\"']?(data:|#))|url\((?!#)|@import|<script|<link", page)
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [(one["task"], one["length"], one["policy"]) for one in rows[:5]] == [
        ("all", "all", "dense"), ("all", "all", "topk(k=0.1)"), ("all", "all", "psa"),
        ("one", "2048", "dense"), ("one", "2048", "topk(k=0.1)"),
    ]  # fmt: skip
    assert len(rows) == 9
    psa = rows[2]
    assert float(psa["score"]) == pytest.approx(4 / 7)
    assert float(psa["difference"]) == pytest.approx(-1 / 7)
    assert float(psa["difference_low"]) < float(psa["difference"])
    assert (psa["errors"], psa["empty"], psa["decode_keys_attended"]) == ("1", "1", "700")
    assert {column.key for column in OVERALL} <= psa.keys()
    assert float(rows[3]["prompt_tokens"]) == 1901.5
    assert "psa" in page.split("<h2>How it was run</h2>")[1]
    assert "<li>1 of 8 samples: error: does not fit</li>" in page
    assert "* `psa`: 2 of 8 samples: ran dense\n" in markdown
    assert write_report([results], tmp_path / "again")[0].read_text() == page


def test_without_matplotlib_the_tables_are_whole(results, tmp_path, monkeypatch):
    whole = write_report([results], tmp_path / "whole")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match=r"saccade-llm\[figures\]"):
        files = write_report([results], tmp_path / "out")
    page, markdown, table = (file.read_text() for file in files)
    assert "<svg" not in page
    assert "matplotlib is not installed, so figures are left out" in page
    assert page.count("<tr") == whole[0].read_text().count("<tr")
    assert (markdown, table) == (whole[1].read_text(), whole[2].read_text())


def test_what_a_page_shows_is_escaped(tmp_path):
    write(tmp_path / "dense", config("dense"), [row("<b>one</b>", 0, 1.0) | {"notes": ["<script>alert(1)</script>"]}])
    page = write_report([tmp_path], tmp_path / "out")[0].read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;b&gt;one&lt;/b&gt;" in page


def test_methods_never_share_colour_and_marker(tmp_path):
    names = [f"method{at}" for at in range(20)]
    runs = [Run.load(write(tmp_path / name, config(name), [])) for name in names]
    assert len({(look["color"], look["marker"]) for look in plots._looks(runs).values()}) == 22


def test_worse_than_dense_is_marked_by_more_than_colour(tmp_path):
    for policy, score in (("dense", 1.0), ("streaming", 0.0)):
        write(tmp_path / policy, config(policy), [row("one", at, score) for at in range(9)])
    page = write_report([tmp_path], tmp_path / "out")[0].read_text()
    assert "▼ -100.0 [-100.0, -100.0]" in page


def test_depths_are_binned_over_lengths(tmp_path):
    def at(depth, score, index, length):
        turns = [{"score": score, "position": "end", "depth": depth}]
        return row("one", index, score, turns=turns, length=length)

    rows = [at(0.0, 1, 0, 2048), at(0.09, 0, 1, 2048), at(0.95, 1, 2, 2048), at(1.0, 0.5, 3, 2048), at(0.5, 1, 4, 4096)]
    folder = write(tmp_path / "dense", config("dense"), rows)
    assert depth_table(Run.load(folder)) == {(2048, 0): 0.5, (2048, 9): 0.75, (4096, 5): 1.0}
    page = write_report([folder], tmp_path / "out")[0].read_text()
    assert "Score by depth and length" in page
    assert page.count("<svg") == 1


def test_the_position_gap_is_taken_relative_to_dense(tmp_path):
    scores = {"dense": (0.8, 0.9, 1.0), "psa": (0.4, 0.8, 1.0)}
    for policy, by_position in scores.items():
        rows = [
            row(f"three_turn_{name}", 0, score, turns=[{"score": score, "position": name, "depth": None}])
            for name, score in zip(("begin", "middle", "end"), by_position)
        ]
        rows.append(row("single", 0, 0.0))  # asked in one place only: not part of the gap
        write(tmp_path / policy, config(policy), rows)
    (group,) = load_groups([tmp_path])
    assert position_scores(group.runs[1]) == {"begin": 0.4, "middle": 0.8, "end": 1.0}
    page, markdown, _ = (file.read_text() for file in write_report([tmp_path], tmp_path / "out"))
    assert "| `psa` | 40.0 | 80.0 | 100.0 | +60.0 | +40.0 |" in markdown
    assert "| `dense` | 80.0 | 90.0 | 100.0 | +20.0 | – |" in markdown
    assert page.count("<svg") == 2


def test_pictures_of_a_result_folder_are_taken_in(results, tmp_path):
    figures = results / "psa" / "figures"
    figures.mkdir()
    (figures / "layer_0.png").write_bytes(PNG)
    (figures / "layer_1.svg").write_text('<?xml version="1.0"?>\n<svg id="mine"></svg>')
    page = write_report([results], tmp_path / "out")[0].read_text()
    assert base64.b64encode(PNG).decode() in page
    assert '<svg id="mine">' in page
    assert "layer 0" in page


def test_what_makes_rows_unlike_is_said(tmp_path):
    rows = [row("one", 0, 1.0), row("one", 1, 1.0)]
    write(tmp_path / "dense", config("dense", continued_with=[{}]), rows)
    write(tmp_path / "psa", config("psa", commit="e" * 40), [row("one", 0, 1.0)])
    page = write_report([tmp_path], tmp_path / "out")[0].read_text()
    assert "dense was begun and continued in unlike environments" in page
    assert "psa has 1 samples, dense 2" in page
    assert "These rows come from 2 environments" in page
    alone = write_report([tmp_path / "psa"], tmp_path / "alone")[0].read_text()
    assert "No dense run" in alone


def test_errors_name_what_is_missing(results, tmp_path):
    with pytest.raises(RequestError, match="holds no results"):
        load_groups([tmp_path / "absent"])
    (results / "psa" / "scores.jsonl").unlink()
    with pytest.raises(RequestError, match=r"has no scores\.jsonl; run saccade eval score"):
        load_groups([results])
    (results / "psa" / "config.json").write_text("{")
    with pytest.raises(RequestError, match=r"config\.json cannot be read"):
        load_groups([results])
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="cannot be written"):
        write_report([results / "dense"], tmp_path / "file")


def test_the_terminal_shows_the_overall_table(results, capsys):
    print_summary([results])
    out = capsys.readouterr().out
    assert "m on d" in out
    assert "topk(k=0.1)" in out
    assert "57.1" in out


def test_a_group_without_samples_has_no_scores(tmp_path):
    run = Run.load(write(tmp_path / "dense", config("dense"), []))
    cell = Group([run]).cell(run)
    assert (cell.score, cell.percent, cell.difference, cell.kv_bytes, cell.density("decode")) == (None,) * 5
    assert write_report([tmp_path], tmp_path / "out")[0].is_file()


def test_the_page_names_files_without_their_folders(tmp_path):
    """Where a run's files lay is the business of its own machine."""
    settings = config("dense")
    settings["model"] |= {"name": "/home/me/models/m", "path": "/home/me/models/m"}
    settings["data"]["path"] = "/home/me/data/d.jsonl"
    write(tmp_path / "dense", settings, [row("one", 0, 1.0)])
    pages = [path.read_text() for path in write_report([tmp_path / "dense"], tmp_path / "out")]
    assert not any("/home/me" in page for page in pages)
    assert any("d.jsonl" in page for page in pages)


def test_a_dense_score_below_half_stands_beside_the_table(tmp_path, capsys):
    """Below half: named with its tasks and a way out, in the page, the Markdown and the summary; at half: not."""
    for name, scores, said in (("low", (0.0, 0.9), True), ("half", (0.1, 0.9), False)):
        for policy in ("dense", "psa"):
            rows = [row("one", 0, scores[0]), row("two", 0, scores[1])]
            write(tmp_path / name / policy, config(policy), rows)
        files = write_report([tmp_path / name], tmp_path / name / "out")
        print_summary([tmp_path / name])
        texts = [files[0].read_text(), files[1].read_text(), capsys.readouterr().out]
        for text in texts:
            text = " ".join(text.split())
            assert ("Dense attention scores 45.0 of 100 here, below half" in text) == said
            assert ("Tasks below half: one 0.0. Take a model" in text) == said
            assert ("Dense attention scores below half on one 10.0" in text) != said
    assert run_notes(tmp_path / "low" / "dense") == [
        "warning: Dense attention scores 45.0 of 100 here, below half, so these samples cannot tell what a sparse "
        f"method loses. Tasks below half: one 0.0. {WAY_OUT}."
    ]
    assert run_notes(tmp_path / "low" / "psa") == run_notes(tmp_path / "half" / "dense") == []


def run_notes(folder: Path) -> list[str]:
    notes: list[str] = []
    say_weak(folder, notes.append)
    return notes


def test_without_dense_nothing_can_be_said_against_it(tmp_path, capsys):
    write(tmp_path / "psa", config("psa"), [row("one", 0, 1.0)])
    files = write_report([tmp_path / "psa"], tmp_path / "out")
    print_summary([tmp_path / "psa"])
    for text in (files[0].read_text(), files[1].read_text(), capsys.readouterr().out):
        assert "nothing can be said against dense" in " ".join(text.split())
    empty = Run.load(write(tmp_path / "dense", config("dense"), [row("one", 0, None)]))
    assert dense_score(empty) is None
