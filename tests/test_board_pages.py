"""``benchmarks/board_pages.py``: boards that come back as archives become pages, tables, and what was left out."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from saccade.cli.main import main

ROOT = Path(__file__).parents[1]


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import board_pages

    return board_pages


def run(model, out, *words):
    command = ["eval", "board", "--model", model, "--length", "512", "--protocol", "B", "--recall", "0", *words]
    with pytest.raises(SystemExit) as ended:
        main([*map(str, command), "--dtype", "float32", "--kv-memory", "16MiB", "--drift", "4", "--out", str(out)])
    assert not ended.value.code


def archive(folder, file, *names):
    with tarfile.open(file, "w:gz") as packed:
        for name in names:
            packed.add(folder / name, name, filter=lambda one: None if one.name.endswith("/data") else one)
    return file


def test_archives_become_pages(tmp_path, tiny_llama, far_llama, pages, capsys):
    boards, out = tmp_path / "boards", tmp_path / "results"
    quest = ("--method", "quest", "--keys", "128", "--no-answers")
    run(tiny_llama, boards / "a", *quest)
    run(tiny_llama, boards / "again", "--method", "streaming", "--without", "streaming, prefill", *quest[2:])
    run(far_llama, boards / "b", *quest)
    one = archive(boards, tmp_path / "one.tgz", "a", "again")
    site = tmp_path / "mkdocs.yml"
    site.write_text('nav:\n          - "One": results/board-x-tables.md\n  - Last: last.md\n')
    words = [f"One={one}", f"Two 2.5={boards / 'b'}", "--made", "Two cores, one day", "--out", str(out)]
    capsys.readouterr()
    ended = pages.main([*words, "--navigation", str(site)])
    said = (out / "board-real.md").read_text()
    files = [f"One={out / 'board-real-one-512.json'}", f"Two 2.5={out / 'board-real-two-2-5-512.json'}"]
    capsys.readouterr()
    held = [pages.leave_one_out.main([*files, "--match", match, "--more", "2"]) for match in pages.MATCHES]
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line for line in said.splitlines() if line.startswith("|")] == shown
    assert len(shown) >= 12
    assert ended == max(held)
    assert {file.name for file in out.iterdir()} == {
        "board-real.md",
        *(f"board-real-{name}{end}" for name in ("one-512", "two-2-5-512") for end in (".html", ".json", "-tables.md")),
    }
    table = (out / "board-real-one-512-tables.md").read_text()
    assert table.startswith("# The board of One at 512\n\nTwo cores, one day ([page](board-real-one-512.html)")
    assert "`quest`" in table
    assert "`streaming`" in table
    assert str(tmp_path) not in table  # no folder of a machine
    rows = json.loads((out / "board-real-one-512.json").read_text())["rows"]
    assert {row["method"] for row in rows} == {"quest", "streaming"}
    assert said.count("## Leave one out") == 3
    assert "[One at 512](board-real-one-512-tables.md)" in said
    navigation = site.read_text()
    assert navigation.count("results/board-real") == 3
    assert navigation.endswith("  - Last: last.md\n")
    assert "| time, of dense's |" in table
    pages.main([*words, "--navigation", str(site), "--no-times"])
    assert site.read_text() == navigation  # added once
    assert "time, of dense's" not in (out / "board-real-one-512-tables.md").read_text()
    later = json.loads((out / "board-real-one-512.json").read_text())["rows"]
    assert all(row["time"] is not None for row in rows)
    assert later == [{**row, "time": None} for row in rows]


def test_what_is_no_board_is_said(tmp_path, pages):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tgz").write_text("no archive")
    for model, why in (
        (f"One={tmp_path / 'empty'}", "holds no board that finished anything"),
        (f"One={tmp_path / 'text.tgz'}", "is no archive of boards"),
        ("One", "must be NAME=PATH"),
    ):
        with pytest.raises(SystemExit, match=why):
            pages.main([model, "--made", "x", "--out", str(tmp_path / "out")])


def test_pages_are_told_apart(pages):
    mixed, long = ("natural:facts", "ruler:vt"), ("long:all",)
    groups = {("S", 4096, tasks): [] for tasks in (mixed, long, (), ("natural:facts", "ruler:cwe"))}
    named = [pages.page_name(group, groups)[0] for group in groups]
    assert named == [
        "board-real-s-4k-1",
        "board-real-s-4k-long-answers",
        "board-real-s-4k-drift",
        "board-real-s-4k-2",
    ]
