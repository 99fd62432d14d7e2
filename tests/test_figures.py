"""``make figures``: what parts say becomes tables, runs are appended, trials are marked, failures are named."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
assert SPEC is not None
assert SPEC.loader is not None
figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(figures)

SAID = {
    "drawn": """note
┏━━━━━━━━┳━━━━━━━━━┓
┃        ┃ prefill ┃
┃ policy ┃ seconds ┃
┡━━━━━━━━╇━━━━━━━━━┩
│ dense  │    1.10 │
│ lfps   │    0.90 │
└────────┴─────────┘
┏━━━━━━━━┓
┃ other  ┃
│ 7      │
└────────┘
""",
    "steps": """loaded in 0.12 s; a step reads 96 MB
  4,096 dense: 12.34 ms a token (81.0 tokens/s), a tenth within 12.00; weights alone 5.00 at 20 GB/s; 1.00 s to token 4
  4,096 lfps(k=0.05): 10.00 ms a token (100.0 tokens/s), a tenth within 9.00; weights alone 5.00 at 20 GB/s
| llama 1B Q4_K - Medium | 606.53 MiB | 1.04 B | CPU | 16 | 1 | tg40 @ d4096 | 50.00 ± 0.10 |
""",
    "seconds": """random, 512 tokens, dense, 6.0 MiB; seconds
stored behind a turn        0.110; the turn's caller waits 3.0 ms
warm, restored              0.008 (median), 0.008 to 0.008
""",
    "markdown": "a model\n\n| policy | score |\n|---|---|\n| `dense` | 98.0 |\n| `lfps` | 96.0, -2.0 [-6.0, 0.0] |\n",
}  # fmt: skip


def test_what_commands_say_becomes_tables():
    assert figures.drawn_table(SAID["drawn"]) == (
        ["policy", "prefill seconds"],
        [["dense", "1.10"], ["lfps", "0.90"]],
    )
    assert figures.step_lines(SAID["steps"])[1] == [
        ["Saccade", "4,096", "`dense`", "12.34", "81.0"],
        ["Saccade", "4,096", "`lfps(k=0.05)`", "10.00", "100.0"],
        ["llama.cpp", "4,096", "–", "20.00", "50.00"],
    ]
    assert figures.second_lines(SAID["seconds"])[1] == [
        ["stored behind a turn", "0.110", "the turn's caller waits 3.0 ms"],
        ["warm, restored", "0.008", "(median), 0.008 to 0.008"],
    ]
    assert figures.markdown_table(SAID["markdown"])[1][1] == ["`lfps`", "96.0, -2.0 [-6.0, 0.0]"]
    for read in figures.READ.values():
        with pytest.raises(ValueError, match="no "):
            read("nothing of the kind")


@pytest.fixture
def ran(monkeypatch) -> list[list[str]]:
    """The commands that were asked for; each says what its part's table takes. Those of ``demo`` fail."""
    commands: list[list[str]] = []
    real = subprocess.run

    def run(words: list[str], **options: Any) -> Any:
        if words[0] == "git":
            return real(words, **options)
        commands.append(words[1:])
        if "demo" in words:
            return subprocess.CompletedProcess(words, 3, "", "out of memory")
        kind = next(
            part["table"]
            for part in figures.PARTS.values()
            if any(shlex.split(part[one])[:4] == words[1:5] for one in ("command", "gpu") if one in part)
            or shlex.split(part["command"])[0] == words[1] != "-m"
        )
        return subprocess.CompletedProcess(words, 0, SAID[kind], "")

    monkeypatch.setattr(figures.subprocess, "run", run)
    return commands


def test_runs_are_appended_and_trials_are_marked(ran, tmp_path, capsys):
    for given in (["sessions", "decode"], ["--quick", "sessions"], ["sessions"]):
        assert figures.main([*given, "--record", str(tmp_path)]) == 0
    assert ran[2] == [*ran[0], "--tokens", "512", "--repeats", "1"]
    runs = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert [(run["quick"], list(run["parts"])) for run in runs] == [
        (False, ["sessions", "decode"]),
        (True, ["sessions"]),
        (False, ["sessions"]),
    ]
    for run in runs:
        assert re.fullmatch(r"[0-9a-f]{8}\+?|unknown", run["commit"])
        assert run["machine"]["cores"] >= 1
    assert [(run is runs[2], name) for run, name in figures.newest(runs)] == [(False, "decode"), (True, "sessions")]
    page = (tmp_path / "figures.md").read_text()
    assert page == figures.page(runs)
    rows = [line for line in page.splitlines() if line.startswith("| 20")]
    assert ["quick" in row for row in rows] == [False, True, False]
    assert "| 0.008 |" in rows[0]
    assert page.count("## A session that comes back") == 1
    assert "python benchmarks/sessions.py\n" in page
    assert str(tmp_path) not in page


def test_a_part_that_fails_is_named_and_the_others_are_kept(ran, tmp_path, capsys):
    assert figures.main(["demo", "sessions", "--record", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("demo: ended with 3: out of memory")
    assert out.startswith("sessions: ")
    (run,) = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert list(run["parts"]) == ["sessions"]
    assert figures.main(["demo", "--record", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()


def test_a_part_without_its_model_is_left_out_and_said(ran, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SACCADE_REAL", str(tmp_path))
    assert figures.main(["accuracy", "sessions", "--record", str(tmp_path)]) == 0
    assert "accuracy: left out, " in capsys.readouterr().out
    (run,) = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert list(run["parts"]) == ["sessions"]


def test_a_peer_gets_the_file_too(ran, tmp_path, monkeypatch):
    monkeypatch.setenv("SACCADE_REAL", str(tmp_path))
    (tmp_path / "smollm2.gguf").touch()
    assert (
        figures.main(["file", "--threads", "3", "--llama-bench", "/opt/bin/llama-bench", "--record", str(tmp_path)])
        == 0
    )
    assert ran[0][1:4] == [str(tmp_path / "smollm2.gguf"), "--threads", "3"]
    assert ran[0][-2:] == ["--peer", "/opt/bin/llama-bench -fa 1"]


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        figures.main(["speed"])
    assert "no part speed; known: disk, demo" in capsys.readouterr().err


def test_parts_name_what_is_there():
    for name, part in figures.PARTS.items():
        assert part["table"] in figures.READ, name
        for line in (part["command"], part.get("gpu", part["command"])):
            first = shlex.split(line)[0]
            assert first == "-m" or (ROOT / first).is_file(), name


def test_the_disk_that_packages_take_is_counted():
    columns, rows = figures.markdown_table(figures.disk())
    assert columns == ["package", "GB"]
    assert rows[0][0] == "all"
    assert float(rows[0][1]) > 0.3
    assert "torch" in [name for name, _ in rows]


@pytest.mark.thorough
def test_every_part_runs(tmp_path):
    """Really, on short inputs: a minute on an idle machine."""
    assert figures.main(["--quick", "--record", str(tmp_path)]) == 0
    (run,) = json.loads((tmp_path / "figures.json").read_text())["runs"]
    for name, found in run["parts"].items():
        word, column = figures.PARTS[name]["shown"]
        assert column in found["columns"], name
        assert any(word in f"{cell} " for row in found["rows"] for cell in row), name
