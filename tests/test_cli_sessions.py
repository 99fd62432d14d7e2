"""Conversations under a name: they go on in a later process, belong to one at a time, and are listed and removed."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from saccade import LLM, SamplingParams
from saccade.cli.main import main
from saccade.cli.sessions import held, older_file, path_of
from saccade.errors import RequestError

FACT = "The secret password of the lighthouse keeper is 7391-XKQ."
ASK = "The secret password of the lighthouse keeper is"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def run(monkeypatch, capsys, *arguments: str, said: str = "") -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said.encode()), encoding="utf-8"))
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_a_conversation_goes_on_where_it_was_left(monkeypatch, capsys):
    talk = ("chat", "-n", "9", "--dtype", "float32", "--kv-memory", "64MiB", "--session", "light-house")
    code, _, error = run(monkeypatch, capsys, *talk, "-p", "lfps", said=f"{FACT}\n")
    assert (code, "going on" in error) == (0, False)
    code, out, error = run(monkeypatch, capsys, *talk, said=f"{ASK}\n/policy\n")
    assert code == 0
    assert "going on from 1 turns" in error
    assert "7391-XKQ" in out
    assert "policy: lfps" in error
    code, out, _ = run(monkeypatch, capsys, "sessions")
    assert (code, out.split()[0]) == (0, "light-house")
    code, _, error = run(monkeypatch, capsys, *talk, said="/report\n/reset\n")
    assert (code, "going on from 2 turns" in error) == (0, True)
    assert "no sessions" in run(monkeypatch, capsys, "sessions")[1]


def test_another_models_conversation_names_a_way_out_that_the_command_line_has(monkeypatch, capsys):
    talk = ("chat", "-n", "2", "--kv-memory", "64MiB", "--session", "mine", "--dtype")
    assert run(monkeypatch, capsys, *talk, "float32", said=f"{FACT}\n")[0] == 0
    code, _, error = run(monkeypatch, capsys, *talk, "bfloat16", said=f"{ASK}\n")
    assert code == 2
    assert "saved with dtype='float32', not 'bfloat16'" in error
    assert "saccade sessions --remove mine" in error
    assert "recompute" not in error


def test_sessions_are_removed_by_name(monkeypatch, capsys):
    for name in ("one", "two"):
        (path_of(name) / "s").mkdir(parents=True)
        (path_of(name) / "s" / "head").write_bytes(b"x")
    assert run(monkeypatch, capsys, "sessions", "--remove", "one")[:2] == (0, "removed one\n")
    assert run(monkeypatch, capsys, "sessions")[1].split()[0] == "two"
    older_file(path_of("three.1")).write_bytes(b"x")  # of an earlier version
    assert [line.split()[0] for line in run(monkeypatch, capsys, "sessions")[1].splitlines()] == ["three.1", "two"]
    assert run(monkeypatch, capsys, "sessions", "--remove", "three.1")[0] == 0
    code, _, error = run(monkeypatch, capsys, "sessions", "--remove", "one")
    assert (code, "there is no session 'one'" in error) == (2, True)


def test_documents_of_a_restored_talk_stay(monkeypatch, capsys, home):
    """When the context is full, turns go first; those with a document stay, in a later process too."""
    (home / "fact.txt").write_text(FACT)
    talk = ("chat", "-n", "5", "--dtype", "float32", "--kv-memory", "64MiB", "--max-model-len", "200", "--session", "x")
    code, _, error = run(monkeypatch, capsys, *talk, "-f", str(home / "fact.txt"), said="hello there\n")
    assert (code, "tokens; they go before" in error) == (0, True)
    said = "".join(f"{'about something else ' * 2}{number}\n" for number in range(3))
    code, out, error = run(monkeypatch, capsys, *talk, said=f"{said}{ASK}\n/report\n")
    assert (code, "going on from 1 turns" in error, "turns were dropped" in error) == (0, True, True)
    assert "7391" in out
    assert "session: " in error


def test_a_talk_of_an_earlier_version_goes_on(monkeypatch, capsys):
    older_file(path_of("old")).parent.mkdir(parents=True)
    with LLM("retriever", dtype="float32", kv_memory="64MiB") as llm:
        session = llm.session()
        session.chat(FACT, SamplingParams(max_tokens=9))
        session.save(older_file(path_of("old")))
    talk = ("chat", "-n", "9", "--dtype", "float32", "--kv-memory", "64MiB", "--session", "old")
    code, out, error = run(monkeypatch, capsys, *talk, said=f"{ASK}\n")
    assert (code, "going on from 1 turns" in error, "7391-XKQ" in out) == (0, True, True)
    assert not older_file(path_of("old")).exists()
    assert "going on from 2 turns" in run(monkeypatch, capsys, *talk)[2]


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "x" * 101, "a\nb"])
def test_names_that_are_none(monkeypatch, capsys, name):
    code, _, error = run(monkeypatch, capsys, "chat", "--session", name)
    assert code == 2
    assert "must be 1 to 100 letters" in error
    assert error.count("\n") == 1


def test_a_session_belongs_to_one_process(home):
    code = "import sys; from saccade.cli.main import main; main(['sessions', '--remove', 'talk'])"
    path = path_of("talk")
    path.mkdir(parents=True)
    with held(path):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert (other.returncode, "another process talks in the session 'talk'" in other.stderr) == (2, True)
    with held(path), pytest.raises(RequestError, match="another process"), held(path):
        pass
