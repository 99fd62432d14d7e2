"""saccade eval's prepare, predict, score, report, run and target, from the command line with the built-in models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_samples import SOURCES, made
from tiny_models import one_thread  # noqa: F401 - a fixture

from saccade.cli.main import main
from saccade.eval import runner
from saccade.eval.samples import read_jsonl


def run(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        main(["eval", *args])
    out, err = capsys.readouterr()
    return int(exit_info.value.code or 0), out, err


def test_run_and_target_from_the_command_line(capsys, tmp_path):
    common = (
        "-m",
        "retriever",
        "-t",
        "facts:single",
        "--length",
        "900",
        "--samples",
        "2",
        "-o",
        str(tmp_path),
        "--threads",
        "1",
    )
    code, out, err = run(capsys, "run", "-p", "psa(epsilon=0.98)", "-p", "streaming(window=100)", *common)
    assert code == 0, err
    folders = sorted(folder.name for folder in (tmp_path / "results").iterdir())
    assert any(name.startswith("retriever__topk_k-0.") for name in folders)
    assert "retriever__psa_epsilon-0.98__A__smoke-facts_single-900-n2" in folders
    assert "streaming(window=100)" in out
    assert (tmp_path / "report" / "report.html").is_file()
    before = {file: file.read_bytes() for file in (tmp_path / "results").glob("*/*.jsonl")}
    assert run(capsys, "run", "-p", "psa(epsilon=0.98)", "-p", "streaming(window=100)", *common)[0] == 0
    assert {file: file.read_bytes() for file in (tmp_path / "results").glob("*/*.jsonl")} == before
    window = ("--method", "streaming", "--option", "window", "--keep", "0.98")
    code, out, err = run(capsys, "target", *window, "--values", "100,2000", *common)
    assert code == 0, err
    assert out.startswith("streaming(window=2000) keeps 100.0 % of dense at density 1.0")
    code, out, err = run(capsys, "target", *window, "--values", "90,100", *common)
    assert code == 0, err
    assert out.startswith("no value of window keeps 98 % of dense: the best is streaming(window=")


def test_the_steps_one_by_one(capsys, tmp_path):
    code, out, _ = run(
        capsys, "prepare", "-t", "facts:shared", "--length", "900", "--samples", "1", "-o", str(tmp_path)
    )
    assert code == 0
    code, out, err = run(
        capsys,
        "predict",
        out.strip(),
        "-m",
        "retriever",
        "-p",
        "dense",
        "-o",
        str(tmp_path / "results"),
        "--threads",
        "1",
    )
    assert code == 0, err
    code, out, _ = run(capsys, "score", out.strip())
    assert code == 0
    assert [row["score"] for row in read_jsonl(Path(out.strip()))] == [1.0]
    code, out, _ = run(capsys, "report", str(tmp_path / "results"), "-o", str(tmp_path / "report"))
    assert (code, out.count("\n")) == (0, 3)


def test_the_suite_with_the_reference_model(capsys, tmp_path):
    """Conversations of the suite through the trained model's template, with gold answers between the turns."""
    tasks = ("-t", "single", "-t", "three_turn_middle", "-t", "shared")
    asked = ("--length", "512", "--samples", "1", "--history", "gold", "--protocol", "B")
    code, _, err = run(capsys, "run", *tasks, *asked, "-p", "dense", "--oracle", "none", "-o", str(tmp_path))
    assert code == 0, err
    (folder,) = (tmp_path / "results").glob("reference__dense__B__*__gold")
    rows = {row["id"]: row for row in read_jsonl(folder / "scores.jsonl")}
    assert list(rows) == [f"{task}/512/0/0" for task in ("single", "three_turn_middle", "shared")]
    assert rows["single/512/0/0"]["score"] == 1.0
    for row in rows.values():
        assert row["error"] is None
        assert 460 <= row["prompt_tokens"] <= 512
        assert row["protocol"] == ("A" if row["task"] == "three_turn_middle" else "B")


BAD = {
    "size": (["run", "--suite", "huge"], "unknown size 'huge'; known: smoke, core, full"),
    "task": (["run", "-t", "facts:sinle"], "did you mean 'single'"),
    "policy": (["run", "-p", "pssa"], "psa"),
    "protocol": (["predict", "DATA", "-p", "psa", "--protocol", "E"], "known: A, B"),
    "model": (["predict", "DATA", "-p", "psa", "-m", "absent-model"], "absent-model"),
    "data": (["predict", "absent.jsonl", "-p", "psa"], "absent.jsonl does not exist"),
    "limit": (["predict", "DATA", "-p", "psa", "--limit", "0"], "limit=0"),
    "samples": (["prepare", "-t", "facts:single", "--samples", "0"], "samples=0"),
    "length": (["prepare", "-t", "facts:single", "--length", "3"], "length=3"),
    "no results": (["report", "."], "holds no results"),
    "out": (["prepare", "-t", "facts:single", "-o", "FILE/below"], "cannot be written"),
    "report out": (["score", "absent"], "absent/config.json does not exist"),
    "values": (["target", "--method", "psa", "--option", "epsilon", "--values", "0.9"], "two different settings"),
    "option": (["target", "--method", "psa", "--option", "epsilo", "--values", "0.8,0.9"], "no option 'epsilo'"),
    "keep": (["target", "--method", "psa", "--option", "epsilon", "--values", "0.8,0.9", "--keep", "2"], "keep=2"),
    "broken data": (["predict", "BROKEN", "-p", "psa"], "broken.jsonl, line 2 is not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_code_2(capsys, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken.jsonl").write_text(json.dumps(made("one", 64, 0, 0).as_dict()) + "\n{torn\n")
    data = runner.prepare(tmp_path / "data", ["single"], [64], 1, sources=SOURCES)
    names = {"DATA": str(data), "BROKEN": "broken.jsonl", "FILE/below": "file/below"}
    args, says = BAD[case]
    code, _, err = run(capsys, *(names.get(arg, arg) for arg in args))
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("saccade: error: ")
    assert says in err
