"""Processes for tests that want one of their own: each is forked off a process that has imported torch and
transformers, which takes seconds, and nothing of Saccade.

What is read when those are imported is as it was then, whatever a process is given: OMP_NUM_THREADS and HF_* among it.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

IMPORTED = (
    *(
        "torch",
        "torch._dynamo",
        "transformers",
        "transformers.modeling_utils",
        "transformers.tokenization_utils_tokenizers",
    ),
    *("transformers.generation.logits_process", "transformers.models.llama.modeling_llama", "transformers.cache_utils"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.auto.modeling_auto", "safetensors.torch"),
)


class Forked:
    """As ``subprocess.Popen([sys.executable, *words])``; files of this process, by number, for its standard ones.
    ``session``: one of its own, whose terminal is its input if that is one."""

    stdin: BinaryIO | None = None

    def __init__(
        self,
        words: Sequence[str],
        files: tuple[int, int, int] = (0, 1, 2),
        pass_fds: Sequence[int] = (),
        env: dict[str, str] | None = None,
        session: bool = False,
    ) -> None:
        self.args, self._lock = [sys.executable, *words], threading.Lock()
        self.returncode: int | None = None
        ours, theirs = socket.socketpair()
        asked = {"words": [*words], "env": dict(os.environ if env is None else env), "cwd": os.getcwd()}
        asked |= {"fds": [0, 1, 2, *pass_fds], "session": session}
        with theirs, tempfile.TemporaryFile() as said:  # which may be longer than a datagram
            said.write(json.dumps(asked).encode())
            said.flush()
            socket.send_fds(_server(), [b"x"], [theirs.fileno(), said.fileno(), *files, *pass_fds])
        self._told = ours.makefile("r")
        self.pid = int(self._told.readline())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        with self._lock:
            if self.returncode is None:
                self.returncode = int(self._told.readline())
            return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(words: Sequence[str], timeout: float = 300, env: dict[str, str] | None = None) -> Any:
    """As ``subprocess.run([sys.executable, *words], capture_output=True, text=True)``."""
    pipes = [os.pipe() for _ in range(2)]
    with open(os.devnull) as nothing, ThreadPoolExecutor(2) as readers:
        process = Forked(words, (nothing.fileno(), *(end for _, end in pipes)), env=env)
        for _, end in pipes:
            os.close(end)
        said = [readers.submit(_read, end) for end, _ in pipes]
        try:
            process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, *(one.result() for one in said))


def _read(pipe: int) -> str:
    with os.fdopen(pipe, errors="replace") as file:
        return file.read()


def popen(
    command: Sequence[str],
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    env: dict[str, str] | None = None,
    bufsize: int = 0,
    start_new_session: bool = False,
) -> Forked:
    """As ``subprocess.Popen``, of what Saccade asks of it where it starts its own processes."""
    assert (command[0], bufsize, stdout) in [(sys.executable, 0, None), (sys.executable, 0, subprocess.DEVNULL)]
    with open(os.devnull, "r+b") as nothing:
        reading, writing = os.pipe() if stdin == subprocess.PIPE else (os.dup(nothing.fileno()), None)
        files = (reading, 1 if stdout is None else nothing.fileno(), 2)
        process = Forked(command[1:], files, pass_fds, env, start_new_session)
    os.close(reading)
    process.stdin = None if writing is None else os.fdopen(writing, "wb", 0)
    return process


SUBPROCESS = types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # for a module in place of ``subprocess``


@cache
def _server() -> socket.socket:
    """Started once; it ends with this process."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for whoever asks, and tell how each process ended. Returns in those alone: what was asked, and its files."""
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([channel, woken], [], [])[0]
        if woken in ready:
            woken.recv(1 << 10)
            for pid in [*running]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _tell(running.pop(pid), os.waitstatus_to_exitcode(status))
        if channel not in ready:
            continue
        data, descriptors, *_ = socket.recv_fds(channel, 1, 30)
        if not data:
            sys.exit(0)
        told, said, *files = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (channel, woken, wakes, *running.values()):
                one.close()
            os.close(told)
            with open(said, "rb") as file:
                file.seek(0)
                return json.load(file), files
        running[pid] = socket.socket(fileno=told)
        _tell(running[pid], pid)
        for number in (said, *files):
            os.close(number)


def _tell(channel: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody waits for it
        channel.sendall(b"%d\n" % number)


def become(asked: dict[str, Any], files: list[int]) -> None:
    """Be the process that was asked for, as far as a program sees."""
    files = [
        os.dup2(os.dup(one), 200 + at) for at, one in enumerate(files)
    ]  # out of the way of numbers that are wanted
    for number, wanted in zip(files, asked["fds"]):
        os.dup2(number, wanted)
        os.close(number)
    if asked["session"]:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)


def program(words: list[str]) -> None:
    """What Python does with its arguments."""
    kind, *rest = words
    sys.path[:] = [one for one in sys.path if one != str(Path(__file__).parent)]
    sys.path[:0] = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one not in sys.path]
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, sys.argv = rest[0], ["-c", *rest[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    sys.modules["triton"] = None  # type: ignore[assignment]  # which says at exit that what is frozen leaked
    for module in IMPORTED:
        import_module(module)
    del sys.modules["triton"]
    assert not any(name.partition(".")[0] == "saccade" for name in sys.modules)
    gc.collect()
    gc.freeze()  # a second of each process's end goes into garbage collection of it
    request, inherited = serve(socket.socket(fileno=int(sys.argv[1])))
    become(request, inherited)
    program(request["words"])
