"""The examples are short and run."""

from __future__ import annotations

import importlib.util
import json
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


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its code cells in their order, in one process as a kernel would run them. It is stored without outputs."""
    matplotlib = pytest.importorskip("matplotlib", reason="pip install 'saccade-llm[eval]'")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    cells = json.loads((FOLDER / "compare.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)
    names: dict = {"__name__": "__main__"}
    settings, *others = ("".join(cell["source"]) for cell in codes)
    exec(compile(settings, "settings", "exec"), names)
    question = names["QUESTIONS"][0]
    text = names["TEXT"][names["TEXT"].index(question) :][:1000]
    names |= {"TEXT": text + text[:200], "FORCED": 48, "TOKENS": 9, "QUESTIONS": [question]}
    for number, code in enumerate(others):
        exec(compile(code, f"cell {number}", "exec"), names)
    assert names["answers"][question, "dense"] == names["answers"][question, "psa"] == " 9877-PTC"
    assert set(names["drift"]) == set(names["POLICIES"])
    drift = names["drift"]
    assert drift["psa"]["kl"] < 0.1 < drift["streaming(window=512)"]["kl"]
    assert 0 < drift["psa"]["decode"] < 1 == drift["psa"]["prefill"]
    assert drift["streaming(window=512)"]["kept"] < 0.9 < drift["psa"]["kept"]
    assert (tmp_path / "maps" / "heads.csv").is_file()
    assert len(names["pictures"]) == 2
    assert len(pyplot.get_fignums()) == 2
    pyplot.close("all")
    assert "agrees" in capsys.readouterr().out
