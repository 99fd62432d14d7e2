"""The command line where output is full, closed or of another alphabet, and where names lead nowhere: one line and exit
code 2, or a silent end, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import fork_server
import pytest

from saccade.cli.main import main

LONG = "n" * 300


def run(command: str) -> subprocess.CompletedProcess[str]:
    saccade = f"{sys.executable} -c 'from saccade.cli.main import main; main()'"
    return subprocess.run(
        ["bash", "-c", "set -o pipefail; " + command.replace("saccade", saccade)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=300,
    )


# Answers of forks of one process that has imported everything: what it takes to import it is no part of what is tested.
FORKS = """
import os, sys
from saccade import LLM
from saccade.cli.main import main
from saccade.models.loader import load_model

errors, model = sys.argv[1:]
load_model(model)
asked = ["generate", "-m", model, "hi"]

def fork(name, out, words):
    if os.fork():
        print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        return
    os.dup2(os.open(f"{errors}/{name}", os.O_WRONLY | os.O_CREAT), 2)
    os.close(1) if out is None else os.dup2(out, 1)
    if out is None:
        sys.stdout = None  # as Python begins where it is closed
    if name == "asked":
        os.close(0)
        sys.stdin = None
    main([*asked, *words.split()])

left, pipe = os.pipe()
os.close(left)
fork("full", os.open("/dev/full", os.O_WRONLY), "--max-tokens 2")
fork("closed", None, "--raw --max-tokens 2")
fork("unread", pipe, "--max-tokens 90 --ignore-eos -q")
asked = ["chat", "-m", model, "--policy", "dense"]
fork("asked", os.open(os.devnull, os.O_WRONLY), "")
asked = ["generate", "-m", model, "-f", "-"]
fork("asked", os.open(os.devnull, os.O_WRONLY), "")
"""


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "-m", "~nouser/x", "hi"],
        ["generate", "-m", LONG, "hi"],
        ["generate", "-m", "reference", "-f", LONG],
    ],
)
def test_what_cannot_be_opened_is_one_line(args, capfd):
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capfd.readouterr().err
    assert ended.value.code == 2, said
    assert said.startswith("saccade: error: ")
    assert said.count("\n") == 1


def test_output_that_is_full_closed_or_unread(tmp_path, tiny_llama):
    """What cannot be written is one line and exit code 2; what nobody reads ends in silence, and so does a chat whose
    input is closed."""
    done = fork_server.run(["-c", FORKS, str(tmp_path), str(tiny_llama)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:5] == ["full 2", "closed 0", "unread 0", "asked 0", "asked 2"]
    said = {name: (tmp_path / name).read_text(encoding="utf-8") for name in ("full", "closed", "unread")}
    assert said["full"].startswith("saccade: error: ")
    assert said["full"].count("\n") == 1
    for name in ("closed", "unread"):
        assert said[name].count("\n") <= 1  # the answer's report
        assert "Error" not in said[name]
    assert (tmp_path / "asked").read_text(encoding="utf-8").startswith("saccade: error: standard input is empty; ")


def test_what_cannot_be_written_is_one_line():
    done = run("saccade --version > /dev/full")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("saccade: error: ")
    assert done.stderr.count("\n") == 1


def test_an_interrupt_while_commands_are_imported_is_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("saccade.cli.main._mount_bench", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 130


def test_output_that_nobody_reads_to_its_end_ends_in_silence():
    done = run("saccade --help | head -1")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_alphabet_without_the_letters_of_an_answer(monkeypatch):
    code = "import saccade.cli.main as m; m._prepare_output(); print('h\\u00e9')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"h\\xe9\n")
