"""The examples are short and run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
FILES = sorted(FOLDER.glob("*.py"))


def main_of(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_each_has_at_most_40_lines():
    """Those that ask a server through a client's package run in ``make conformance``."""
    for file in [*FILES, *FOLDER.glob("*.mjs")]:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 40, file.name


def test_one_document(capsys):
    main_of("one_document")()
    lines = capsys.readouterr().out.splitlines()
    for line, answer in zip(lines, ("is 7391-XKQ   [", "is lentil soup with mint   ["), strict=True):
        assert answer in line
        kept, total = (int(word) for word in line.partition("[")[2].split() if word.isdigit())
        assert total - 100 < kept < total


def test_a_document_of_ones_own(capsys, tmp_path):
    (tmp_path / "text.txt").write_text(
        "The favourite dish of the baker is cold rye bread. And so on.", encoding="utf-8"
    )
    main_of("one_document")("retriever", str(tmp_path / "text.txt"))
    assert "cold rye bread" in capsys.readouterr().out


def test_session(capsys):
    main_of("session")()
    out = capsys.readouterr().out
    assert "7391-XKQ" in out.partition("(psa)")[2]
    assert "3 turns" in out


def test_compare_policies(capsys):
    main_of("compare_policies")()
    rows = {line[:34].strip(): line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "7391-XKQ" in rows["dense"]
    assert "100.0%" in rows["dense"]
    assert "7391-XKQ" not in rows["streaming(window=256)"]
    assert "7391-XKQ" in rows["flexprefill(min_budget=256)+psa"]


def test_report_and_maps(capsys, tmp_path):
    main_of("report_and_maps")(str(tmp_path))
    assert '"density": 0.' in capsys.readouterr().out
    assert (tmp_path / "heads.csv").is_file()


def test_lm_eval(capsys):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'saccade-llm[lm-eval]'")
    main_of("lm_eval_tasks")()
    assert "recall" in capsys.readouterr().out


def test_server_client(capsys):
    from server_helpers import serving

    from saccade import LLM

    with serving(LLM()) as server:
        main_of("server_client")(server.url + "/v1")
    rows = capsys.readouterr().out.splitlines()
    assert ["7391-XKQ" in row for row in rows] == [True, False, True]
    assert "prefill 100.0%" in rows[0]
