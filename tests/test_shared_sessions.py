"""One folder of sessions for several processes: each goes on with what another stored, and nobody loses anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_helpers import make
from test_durable import FIRST, SCORED, SECOND, THIRD, same
from tiny_models import one_thread as one_thread

from saccade.engine.settings.config import EngineConfig
from saccade.errors import SaccadeError
from saccade.sessions.shared_store import SharedFileStore
from saccade.sessions.stores import FileStore, InUse

POLICY = "flexprefill(gamma=0.5, block_size=64, min_budget=0)+lfps(k=16, blocks=2, least=16, history=keep)"


def replica(checkpoint, folder):
    llm = make(checkpoint, session_dir=folder, session_shared=True)
    llm.sessions.segments.size = 32
    return llm


def say(llm, *turns, policy=POLICY):
    """One turn after another of the session ``talk``, each stored before this returns; the last answer."""
    with llm.session(policy, name="talk") as session:
        for turn in turns:
            answer = session.generate(turn, SCORED)
        llm.sessions.flush()
    return answer


def groups(folder):
    return sorted(path.parent.parent.name for path in folder.glob("process.*/s*/head"))


def test_each_process_writes_by_itself_and_reads_all(tmp_path):
    FileStore(tmp_path).put("s0/head", b"of a time before it was shared")
    one, other = (SharedFileStore(tmp_path) for _ in range(2))
    with pytest.raises(InUse, match="in use by"):
        FileStore(tmp_path)
    one.put("s1/head", b"first")
    one.put("s1/a", b"rows")
    assert [bytes(other.get(key)) for key in ("s0/head", "s1/head", "s1/a")][1:] == [b"first", b"rows"]
    other.put("s1/head", b"second")
    assert bytes(one.get("s1/head")) == b"second"  # the last that was put, by whomever
    one.put("s1/head", b"third")
    assert bytes(other.get("s1/head")) == b"third"
    assert [entry.key for entry in other.list()] == ["s1/head"]
    other.delete("s1/head")
    assert one.exists("s1/head")
    assert other.exists("s1/head")
    one.close()
    assert bytes(other.get("s1/a")) == b"rows"  # a process that has ended is read, too
    again = SharedFileStore(tmp_path)
    assert sorted(entry.key for entry in again.list()) == ["s1/a", "s1/head"]  # and its folder goes on
    assert other.forget("s1/head")
    assert not other.forget("s1/head")
    assert (again.exists("s1/head"), again.get("s1/a"), again.exists("s0/head")) == (False, None, True)
    for store in (other, again):
        store.close()
    with pytest.raises(SaccadeError, match="was closed"):
        other.put("s1/head", b"")
    FileStore(tmp_path).close()


def test_a_folder_that_may_not_be_read_costs_nothing(tmp_path, monkeypatch):
    one, other = (SharedFileStore(tmp_path) for _ in range(2))
    one.put("s1/head", b"another user's")
    other.put("s2/head", b"mine")
    is_file = Path.is_file

    def guarded(path):
        if "process.0" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", guarded)
    assert (other.exists("s1/head"), other.get("s1/head")) == (False, None)
    assert bytes(other.get("s2/head")) == b"mine"


def test_the_folder_of_a_killed_process_is_taken_over(tmp_path):
    code = (
        "import os, sys, signal; from saccade.sessions.shared_store import SharedFileStore as S;"
        "store = S(sys.argv[1]);"
        "store.put('s1/head', b'said'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)
    store = SharedFileStore(tmp_path)
    assert groups(tmp_path) == ["process.0"]
    assert bytes(store.get("s1/head")) == b"said"
    store.close()


def test_a_session_moves_between_processes(llm, tiny_llama, tmp_path):
    """There and back, and on after its process has died, as if it had never moved; nothing is computed again."""
    with llm.session(POLICY) as session:
        expected = [session.generate(turn, SCORED) for turn in (FIRST, SECOND, THIRD, SECOND)]
        said = [answer.report["prompt_tokens"] for answer in expected]
    one, other = replica(tiny_llama, tmp_path), replica(tiny_llama, tmp_path)
    say(one, FIRST)
    moved = say(other, SECOND)
    same(moved, expected[1])
    assert moved.report["cached_tokens"] == said[0] + 7
    assert other.sessions.counts["tokens_recomputed"] == 0
    assert groups(tmp_path) == ["process.0", "process.1"]  # whoever goes on stores all of it
    back = say(one, THIRD)
    same(back, expected[2])
    assert back.report["cached_tokens"] == said[1] + 7
    assert one.sessions.stored()[0].tokens == said[2] + 8
    one.close()
    for path in (tmp_path / "process.0").glob("s*/*"):
        if path.name != "head":
            path.unlink()  # its disk is gone in part: what another has of an older turn is of no use for it
    third = replica(tiny_llama, tmp_path)
    last = say(third, SECOND)
    same(last, expected[3])
    assert third.sessions.counts["tokens_recomputed"] > 0
    assert third.sessions.forget("talk")
    assert groups(tmp_path) == []
    assert not other.sessions.has("talk")
    for each in (other, third):
        each.close()


def test_a_bound_removes_what_this_process_has_alone(tiny_llama, tmp_path):
    one, other = replica(tiny_llama, tmp_path), replica(tiny_llama, tmp_path)
    say(one, FIRST)
    one_size = one.sessions.size
    say(other, SECOND)
    other.sessions.limit = one_size
    with other.session(POLICY, name="another") as session:
        session.generate(FIRST, SCORED)
        other.sessions.flush()
    assert other.sessions.counts["removed"] == 1
    assert other.sessions.has("talk")  # as the first one knows it
    with other.session(POLICY, name="talk") as session:
        assert session.token_ids[: len(FIRST)] == FIRST
        assert len(session.token_ids) == len(FIRST) + 8
    for each in (one, other):
        each.close()


def test_what_is_shared_is_named():
    with pytest.raises(SaccadeError, match=r"session_shared=True .* give session_dir or kv_disk"):
        EngineConfig.of(session_shared=True)
    with pytest.raises(SaccadeError, match="session_shared='yes' must be True or False"):
        EngineConfig.of(session_shared="yes", session_dir=os.curdir)
