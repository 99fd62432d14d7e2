"""The command line where output is full, closed or of another alphabet, and where names lead nowhere: one line and exit
code 2, or a silent end, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from saccade.cli.main import main

LONG = "n" * 300


def run(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    saccade = f"{sys.executable} -c 'from saccade.cli.main import main; main()'"
    return subprocess.run(
        ["bash", "-c", "set -o pipefail; " + command.replace("saccade", saccade)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=100,
    )


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


@pytest.mark.parametrize(
    "command", ["saccade generate -m reference hi --max-tokens 2 > /dev/full", "saccade --version > /dev/full"]
)
def test_what_cannot_be_written_is_one_line(command):
    done = run(command)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("saccade: error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "saccade generate -m reference hi --raw --max-tokens 2 >&-",
        "saccade --help | head -1",
        "saccade generate -m reference hi --max-tokens 90 --ignore-eos -q | true",
    ],
)
def test_output_that_nobody_reads_ends_in_silence(command):
    done = run(command)
    assert done.returncode == 0
    assert done.stderr.count("\n") <= 1  # the answer's report
    assert "Error" not in done.stderr


def test_an_alphabet_without_the_letters_of_an_answer(monkeypatch):
    code = "import saccade.cli.main as m; m._prepare_output(); print('h\\u00e9')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"h\\xe9\n")
