"""The command line as a user meets it: answers on stdout, one line and exit code 2 for bad input, never a traceback."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from saccade import machine
from saccade.cli.fits import fits
from saccade.cli.main import main
from saccade.engine.settings.config import EngineConfig

FACT = "The secret password of the lighthouse keeper is 7391-XKQ."
ASK = "The secret password of the lighthouse keeper is"
FILLER = "Rain fell on the harbour while the boats came in, one after another, and nobody spoke of the storm. "


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``saccade ARGS``."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(args))
    out, err = capsys.readouterr()
    return int(exit_info.value.code or 0), out, err


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """About 1,400 characters, the fact near the beginning; a byte-order mark and a last line break, as editors make."""
    path = tmp_path / "document.txt"
    path.write_text("\ufeff" + FILLER * 5 + FACT + " " + FILLER * 8 + "\n", encoding="utf-8")
    return path


def test_document_and_question(capsys, document, tmp_path):
    report = tmp_path / "report.json"
    policy = "flexprefill(min_budget=256)+psa(epsilon=0.98)"
    code, out, err = run(capsys, "generate", ASK, "-f", str(document), "-n", "9", "-p", policy, "--report", str(report))
    assert code == 0
    assert out == " 7391-XKQ\n"
    assert "prefill" in err
    written = json.loads(report.read_text())
    assert written["text"] == " 7391-XKQ"
    assert written["finish_reason"] == "length"
    assert written["prefill"]["policy"] == "flexprefill(min_budget=256)"
    assert written["decode"]["policy"] == "psa(epsilon=0.98)"
    assert 0 < written["prefill"]["density"] < 1
    assert 0 < written["decode"]["density"] < 1
    assert written["output_tokens"] == 9
    assert written["decode"]["tokens"] == 8


def test_streaming_forgets_what_left_the_window(capsys, document):
    code, out, _ = run(capsys, "generate", ASK, "-f", str(document), "-n", "9", "-p", "streaming(window=256)", "-q")
    assert code == 0
    assert "7391" not in out


@pytest.mark.parametrize("option", [[], ["-"], ["-f", "-"]])
def test_prompt_from_standard_input(capsys, monkeypatch, option):
    stdin = io.TextIOWrapper(io.BytesIO(f"{FACT}\n{FILLER}\n{ASK}\n".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = run(capsys, "generate", *option, "-n", "9", "--quiet")
    assert (code, out, err) == (0, " 7391-XKQ\n", "")


@pytest.fixture
def pipe_in(monkeypatch, tmp_path):
    """Makes standard input a pipe (or a file) that holds some bytes, as a shell would."""

    def give(data: bytes, as_file: bool = False) -> None:
        if as_file:
            (tmp_path / "stdin").write_bytes(data)
            stdin = (tmp_path / "stdin").open("rb")
        else:
            read, write = os.pipe()
            with os.fdopen(write, "wb") as end:
                end.write(data)
            stdin = os.fdopen(read, "rb")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin))

    return give


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("option", [[], ["-f", "-"]])
def test_what_is_piped_beside_an_argument_is_the_document(capsys, pipe_in, option, as_file):
    pipe_in(f"{FACT}\n{FILLER}\n".encode(), as_file)
    assert run(capsys, "generate", ASK, *option, "-n", "9", "--quiet") == (0, " 7391-XKQ\n", "")


def test_a_file_is_read_and_a_pipe_beside_it_is_left_alone(capsys, pipe_in, document):
    pipe_in(b"one\ntwo\n")  # of a loop in a shell, say
    assert run(capsys, "generate", ASK, "-f", str(document), "-n", "9", "-q") == (0, " 7391-XKQ\n", "")
    assert sys.stdin.read() == "one\ntwo\n"


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf \n"])
def test_an_empty_document_is_an_error(capsys, pipe_in, tmp_path, data):
    file = tmp_path / "empty.txt"
    file.write_bytes(data)
    code, out, err = run(capsys, "generate", ASK, "-f", str(file))
    assert (code, out) == (2, "")
    assert f"{file} is empty" in err
    for arguments in ([ASK], [], [ASK, "-f", "-"]):
        pipe_in(data)
        code, out, err = run(capsys, "generate", *arguments)
        assert (code, out) == (2, "")
        assert "standard input is empty" in err


def test_a_silent_pipe_is_mentioned(capsys, monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(os.fdopen(read, "rb")))
    monkeypatch.setattr(select, "select", lambda *_: os.close(write) or ([], [], []))  # nothing came, then it ends
    code, _, err = run(capsys, "generate", ASK)
    assert code == 2
    assert "nothing came yet" in err


def test_stop_text_ends_the_answer(capsys):
    code, out, err = run(capsys, "generate", f"{FACT} {FILLER}\n{ASK}", "--stop", "-X")
    assert (code, out) == (0, " 7391\n")
    assert "[stop]" in err


BAD = {
    "no prompt file": (["generate", "-f", "absent.txt"], "absent.txt"),
    "a folder": (["generate", "-f", "."], "folder"),
    "empty prompt": (["generate", ""], "empty"),
    "model": (["generate", "x", "-m", "absent-model"], "absent-model"),
    "policy": (["generate", "x", "-p", "pssa"], "psa"),
    "policy option": (["generate", "x", "-p", "psa(epsilo=1)"], "epsilon"),
    "policy value": (["generate", "x", "-p", "psa(epsilon=1.5)"], "1.5"),
    "negative budget": (["generate", "x", "-p", "topk(k=-5)"], "-5"),
    "negative tokens": (["generate", "x", "-n", "-3"], "-3"),
    "not a number": (["generate", "x", "-n", "many"], "--max-tokens"),
    "unknown option": (["generate", "x", "--colour", "red"], "--colour"),
    "unknown command": (["generat", "x"], "generat"),
    "prompt beyond the model": (["generate", "y" * 600, "--max-model-len", "256"], "256"),
    "prompt beyond the pool": (["generate", "y" * 6000, "--kv-memory", "2MiB"], "kv_memory"),
    "pool too small for anything": (["generate", "x", "--kv-memory", "1KB"], "kv_memory"),
    "memory that is no size": (["generate", "x", "--kv-memory", "plenty"], "plenty"),
    "dtype": (["generate", "x", "--dtype", "int3"], "int3"),
    "report folder": (["generate", "x", "--report", "absent/report.json"], "absent"),
    "threads": (["generate", "x", "--threads", "0"], "threads"),
    "too many threads": (
        ["generate", "x", "--threads", "1000000"],
        "threads=1000000 must be an integer from 1 to 1024",
    ),
    "more memory than there is": (["generate", "x", "--kv-memory", "4000TiB"], "smaller kv_memory"),
    "backend": (["generate", "x", "--backend", "gpu"], "gpu"),
    "demo facts": (["demo", "--facts", "0"], "0"),
    "demo text": (["demo", "--text", "absent.txt"], "absent.txt"),
    "demo text that is empty": (["demo", "--text", os.devnull], f"text file {os.devnull} is empty"),
    "demo tokens of a text": (["demo", "-m", "retriever", "--tokens", "3000"], "tokens=3000 is for --model reference"),
    "demo characters of tokens": (["demo", "-m", "reference", "--characters", "3000"], "characters=3000"),
    "port": (["serve", "--port", "99999"], "port=99999 must be an integer from 0 to 65535"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_code_2(capsys, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, names = BAD[case]
    code, out, err = run(capsys, *args)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("saccade: error: ")
    assert names in err


def test_file_that_is_not_utf8(capsys, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\xe9 au lait".encode("latin-1"))
    code, _, err = run(capsys, "generate", "-f", str(path))
    assert code == 2
    assert "offset 3" in err
    assert "iconv" in err


def test_chat_keeps_what_was_said(capsys, monkeypatch):
    lines = f"{FACT} {FILLER}\n\n{ASK}\n{ASK}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, _ = run(capsys, "chat", "-n", "9")
    assert code == 0
    assert out.count("7391-X") == 2


def _fails(*args, **options):
    raise RuntimeError("no attention today")


def test_a_failed_request_is_told_and_reported(capsys, monkeypatch, tmp_path):
    """It fails in its first layer, so that there is no density to print."""
    monkeypatch.setattr("saccade.engine.rows.calls.run_call", _fails)
    report = tmp_path / "report.json"
    code, out, err = run(capsys, "generate", "hello there", "--report", str(report))
    assert (code, out) == (1, "\n")
    assert "[error] prefill 12 tokens by dense, nothing read, " in err
    assert "the request failed: layer 0, prefill: RuntimeError: no attention today" in err
    assert json.loads(report.read_text())["finish_reason"] == "error"


def test_a_failed_turn_of_a_chat_is_told(capsys, monkeypatch):
    monkeypatch.setattr("saccade.engine.rows.calls.run_call", _fails)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    code, out, err = run(capsys, "chat", "-n", "2")
    assert (code, out) == (0, "\n")
    assert "the turn failed: layer 0, prefill: RuntimeError: no attention today" in err


def test_doctor_names_versions_and_backends(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    sections = {"versions", "machine", "backends", "gpu", "what fits", "models", "recorded decode steps"}
    assert set(facts) == {*sections, "tuned policies"}
    assert {"cis", "h2o", "lfps", "loopserve"} < set(facts["recorded decode steps"]["methods"].split(", "))
    assert facts["recorded decode steps"]["bring KV in from kv_host"].startswith(
        "arkvale, dense, locks, psa, quest, streaming;"
    )
    assert "drawn on the host" in facts["recorded decode steps"]["random"]
    assert facts["versions"]["torch"]
    assert facts["backends"]["reference"].startswith("ready")
    assert run(capsys, "doctor")[1].count("\n") > 10
    assert all(" tokens" in line or "none: " in line for name, line in facts["what fits"].items() if "bit" in name)


def test_what_fits_a_memory():
    least = {name: line.partition(":")[0] for name, line in fits(1 << 30).items()}
    assert list(least.values()) == ["none", "up to 0.5B (Qwen2.5)", "up to 0.5B (Qwen2.5)"]
    whole = fits(80 << 30)
    assert whole["bfloat16"].startswith("up to 32B (Qwen3): 61.1 GiB of weights, and room for 44,000 tokens")
    assert whole["4 bits (Q4_K_M, int4)"].startswith("up to 70B (Llama 3.1): 39.5 GiB of weights, and room for")


def test_doctor_alarms_nobody_on_a_machine_without_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for installed in (False, True):
        monkeypatch.setattr("saccade.ops.triton._installed", installed)
        facts = json.loads(run(capsys, "doctor", "--json")[1])
        assert facts["backends"]["triton"] == "not needed: no GPU"
        assert "slower" not in facts["backends"]["cpu"]
        assert facts["gpu"]["used"] == "no"


@pytest.mark.parametrize("found", [True, False])
def test_the_default_device_is_the_gpu_where_there_is_one(monkeypatch, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    monkeypatch.setattr("saccade.engine.settings.config.best_device", machine.best_device)
    assert EngineConfig().device == ("cuda" if found else "cpu")
    assert EngineConfig(device="cpu").device == "cpu"


def test_what_auto_found_is_said_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Fast GPU")
    note = machine.device_note(torch.device("cuda:1"))
    assert note == "running on Fast GPU (device cuda:1); device cpu keeps to the CPU"
    monkeypatch.setattr("saccade.machine.device_note", lambda device: "running on Fast GPU")
    assert run(capsys, "generate", "hello there", "-n", "1")[2].startswith("saccade: note: running on Fast GPU\n")
    assert run(capsys, "generate", "hello there", "-n", "1", "-q")[2] == ""


def test_version_and_help(capsys):
    import saccade

    assert run(capsys, "--version")[:2] == (0, saccade.__version__ + "\n")
    assert "generate" in run(capsys, "--help")[1]


def test_methods_shows_what_a_short_name_joins(capsys):
    code, out, _ = run(capsys, "methods", "cpe", "--json")
    assert code == 0
    assert list(json.loads(out)) == ["cis", "psaw", "etf"]
    code, out, _ = run(capsys, "methods", "cpe")
    assert code == 0
    assert "Early token freezing" in " ".join(out.split())


def test_demo_compares_policies(capsys):
    given = ["--tokens", "1024", "--facts", "2", "-p", "dense", "-p", "streaming(window=100)"]
    code, out, _ = run(capsys, "demo", "-m", "reference", *given)
    assert code == 0
    assert "1,024 tokens in all" in out
    assert "2/2" in out
    assert "streaming(window=100)" in out


def test_demo_reads_a_text_of_yours(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("The ferry left at noon, and nobody waved. " * 25, encoding="utf-8")
    code, out, _ = run(capsys, "demo", "--text", str(tmp_path / "text.txt"), "--facts", "2", "-p", "dense")
    assert code == 0
    assert "model: retriever" in out
    assert "2/2" in out
    code, _, err = run(capsys, "demo", "--text", str(tmp_path / "text.txt"), "--model", "reference")
    assert code == 2
    assert "--model retriever" in err


def test_demo_cuts_a_text_that_the_model_cannot_read(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.models.loader.max_position", lambda config: 2048)
    (tmp_path / "text.txt").write_text("The ferry left at noon, and nobody waved. " * 500, encoding="utf-8")
    code, out, err = run(capsys, "demo", "--text", str(tmp_path / "text.txt"), "--facts", "2", "-p", "dense")
    assert code == 0
    assert "2/2" in out
    assert "the model reads 2,048 tokens at most, so the text's first 1,536 are used; give a shorter text" in err
    code, out, err = run(capsys, "demo", "--text", str(tmp_path / "text.txt"), "--facts", "8", "-p", "dense")
    assert (code, out) == (2, "")
    assert "give fewer --facts or another --model" in err


def test_demo_shows_how_far_it_is(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("rich.progress.Progress.add_task", lambda self, what, **given: shown.append((what, given)) or 0)
    monkeypatch.setattr("rich.progress.Progress.update", lambda self, bar, **given: shown.append(given))
    monkeypatch.setattr("rich.progress.Progress.remove_task", lambda self, bar: shown.append("done"))
    monkeypatch.setattr("saccade.cli.progress.DELAY", 0.0)
    monkeypatch.setattr("saccade.cli.progress.TICK", 0.005)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    given = ["--tokens", "9000", "--facts", "1", "-p", "streaming(window=64)"]
    code, _, _ = run(capsys, "demo", "-m", "reference", *given)
    assert code == 0
    bar = next(one for one in shown if one[0] == "streaming(window=64)")
    assert bar[1]["said"].endswith(" tokens")
    shares = [one["completed"] for one in shown if "completed" in one]
    assert 0 <= min(shares) < max(shares) <= 1
    assert any(" left" in one["said"] for one in shown if "completed" in one)


@pytest.mark.parametrize(
    ("options", "hint"),
    [([], "give a model that reads more"), (["--max-model-len", "512"], "raise max_model_len (at most 2048)")],
)
def test_the_hint_for_a_long_prompt_is_possible(capsys, monkeypatch, options, hint):
    monkeypatch.setattr("saccade.models.loader.max_position", lambda config: 2048)
    for command in ("generate", "inspect"):
        code, out, err = run(capsys, command, "y" * 4000, *options)
        assert (code, out) == (2, "")
        assert f"shorten it or {hint}" in err


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["eval"], ["eval", "run"], ["bench"], ["methods"]])
def test_short_help(capsys, command):
    short = run(capsys, *command, "-h")
    assert short[0] == 0
    assert "Usage: saccade" in short[1]
    assert short == run(capsys, *command, "--help")


def test_mistyped_commands_and_methods_are_answered_with_what_was_meant(capsys):
    for args, meant in (
        (["generat", "x"], "'generate'? (see: saccade --help)"),
        (["eval", "rn"], "'run'? (see: saccade eval --help)"),
        (["methods", "flexprefil"], "(did you mean 'flexprefill'?)"),
        (["generate", "x", "-p", "lpfs"], "(did you mean 'lfps'?)"),
        (["generate", "x", "-p", "psa(epsilo=0.9)"], "(did you mean 'epsilon'?)"),
    ):
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "")
        assert meant in err


def test_every_method_is_listed_with_phases_paper_and_options(capsys):
    from saccade.methods.registry import KNOWN

    code, out, _ = run(capsys, "methods", "--json")
    listed = json.loads(out)
    assert code == 0
    assert set(listed) == {*KNOWN}
    assert listed["psa"]["phases"] == ["decode"]
    assert listed["flexprefill"]["paper"].endswith("2502.20766")
    assert listed["psa"]["options"]["block_size"] == 32
    assert all(row["phases"] for row in listed.values())
    table = run(capsys, "methods")[1]
    assert all(f" {name} " in table for name in listed)
    assert "epsilon=0.95" in run(capsys, "methods", "psa")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell):
    words = {"bash": {"COMP_WORDS": "saccade gen", "COMP_CWORD": "1"}}
    asked = words.get(shell, {"_TYPER_COMPLETE_ARGS": "saccade gen", "_TYPER_COMPLETE_FISH_ACTION": "get-args"})
    environment = {**os.environ, **asked, "_SACCADE_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(
        [sys.executable, "-m", "saccade"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert "generate" in done.stdout
    assert "chat" not in done.stdout
