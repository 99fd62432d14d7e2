"""What a first process that was killed leaves behind: no process, be it stopped, and no folder for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import make_checkpoint

from saccade.engine.ranks import folder as rank_folder
from saccade.engine.ranks.folder import RankFolder, remove_left
from saccade.engine.ranks.link import RankLink

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not end a process with its parent")
SECONDS = 60.0  # that anything here may take
CHILD = """
import os, signal, time
from saccade.parent import end_with_parent
end_with_parent(lambda: False)
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys, threading, time
from saccade.parent import on_lasting_thread
start = lambda: subprocess.Popen([sys.executable, "-c", {CHILD!r}])
thread = threading.Thread(target=lambda: on_lasting_thread(start))
thread.start()
thread.join()
time.sleep(600)
"""
OWNER = """
import sys, tempfile, time
from saccade.engine.ranks.folder import RankFolder
tempfile.tempdir = sys.argv[1]
made = RankFolder()
print(made.path, flush=True)
time.sleep(600)
"""
FIRST = """
import sys, threading
from saccade import LLM, SamplingParams
made = []
begin = lambda: made.append(LLM(sys.argv[1], tensor_parallel_size=3, device="cpu", dtype="float32", kv_memory="8MiB"))
thread = threading.Thread(target=begin)  # ranks do not end with the thread that made their engine
thread.start()
thread.join()
link = made[0].engine.link
print(link.store_path.parent, *(process.pid for process in link.processes), flush=True)
params = SamplingParams(max_tokens=4, ignore_eos=True)
while True:
    (output,) = made[0].generate("abc", params)
    print("answered" if output.error is None else output.error, flush=True)
"""


def state(pid: int) -> str:
    """A process' state by proc(5); Z where it has ended, whether or not it was waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def soon(condition) -> bool:
    until = time.monotonic() + SECONDS
    while not (true := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return true


@pytest.fixture
def started():
    """Starts Python with some code; it and what it is said to have started end with the test."""
    running: list[subprocess.Popen] = []
    others: list[int] = []

    def start(code: str, *words: str):
        command = [sys.executable, "-c", code, *words]
        running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True))
        return running[-1], others

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()
    for pid in others:
        if state(pid) != "Z":
            os.kill(pid, signal.SIGKILL)


@linux
@pytest.mark.parametrize("stops", [False, True])
def test_a_process_ends_with_its_parent(started, stops):
    """Not with the thread that asked for it; but with the parent, even while it is stopped."""
    parent, others = started(PARENT)
    pid = int(parent.stdout.readline())
    others.append(pid)
    time.sleep(0.2)  # in which the thread has ended
    assert state(pid) == "S"
    if stops:
        os.kill(pid, signal.SIGSTOP)
        assert soon(lambda: state(pid) == "T")
    parent.kill()
    assert soon(lambda: state(pid) == "Z")


def test_a_process_whose_parent_is_gone_ends_at_once(started):
    child, _ = started(CHILD.replace("False", "True"))
    assert child.wait(SECONDS) == 1
    assert child.stdout.read() == ""


@linux
@pytest.mark.thorough
@pytest.mark.parametrize("stopped", [0, 1])
def test_ranks_end_with_the_first(started, tmp_path, stopped):
    """Of two others ``stopped`` are stopped when the first process is killed. Its folder goes with the next engine."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    first, others = started(FIRST, str(make_checkpoint("llama", tmp_path / "model", **sizes)))
    folder, *pids = first.stdout.readline().split()
    others += map(int, pids)
    assert len(others) == 2
    assert first.stdout.readline() == "answered\n"
    for pid in others[:stopped]:
        os.kill(pid, signal.SIGSTOP)
        assert soon(lambda pid=pid: state(pid) == "T")
    first.kill()
    first.wait()
    assert soon(lambda: [state(pid) for pid in others] == ["Z", "Z"])
    assert Path(folder).exists()
    link = RankLink(2)
    assert not Path(folder).exists()
    link.close()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where folders of ranks are made."""
    monkeypatch.setattr(rank_folder.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folders_of_killed_processes_are_removed(folders, started):
    """Those of processes that live stay, as do files that lie there for other reasons."""
    others = []
    for _ in range(2):
        process, _ = started(OWNER, str(folders))
        others.append((process, Path(process.stdout.readline().strip())))
    (folders / "saccade-ranks-file").write_text("")
    (folders / "saccade-ranks-unlocked").mkdir()
    (killed, left), (_, kept) = others
    killed.kill()
    killed.wait()
    assert left.exists()
    own = RankFolder()
    assert sorted(path.name for path in folders.iterdir()) == sorted(
        [own.path.name, kept.name, "saccade-ranks-file", "saccade-ranks-unlocked"]
    )
    own.store.write_text("")
    remove_left()
    assert own.store.exists()
    own.remove()
    assert not own.path.exists()
    assert kept.exists()
