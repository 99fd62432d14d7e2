"""Starts the process of an engine, and waits until its model is loaded."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import EngineLost
from saccade.server import wire, wire_forms

PROGRAM = (sys.executable, "-m", "saccade.server.engine_process")  # what runs the engine


@dataclass
class Launched:
    """An engine's process and this end of the socket to it. ``frames``: what has been read of it so far."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    frames: wire.Frames
    ready: wire.Ready


def launch(
    settings: dict[str, Any], began: Callable[[subprocess.Popen[bytes]], None], loaded: Callable[[Path], None]
) -> Launched:
    """Start a process with ``settings``, JSON that engine_process reads. ``began`` gets it before its model is loaded,
    which takes as long as it takes; ``loaded`` the folder of the tokenizer, while the process makes itself ready.
    Raises what loading raises and what these raise, and EngineLost where it ends before."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*PROGRAM, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
    began(process)
    try:
        start = json.dumps(settings).encode()
        ours.sendall(len(start).to_bytes(4, "little") + start)
        frames = wire.Frames()
        return Launched(process, ours, frames, _first(ours, frames, process, loaded))
    except BaseException as error:
        process.kill()
        process.wait()
        ours.close()
        if isinstance(error, OSError):
            raise EngineLost(f"the engine's process ended before its model was loaded ({how(process)})") from error
        raise


def _first(
    ours: socket.socket, frames: wire.Frames, process: subprocess.Popen[bytes], loaded: Callable[[Path], None]
) -> wire.Ready:
    while data := ours.recv(1 << 16):
        for content in frames.feed(data):
            frame = wire.from_engine(content)
            if isinstance(frame, wire.Loaded):
                loaded(Path(frame.path))
            if isinstance(frame, wire.Ready):
                return frame
            if isinstance(frame, wire.Reply) and frame.error is not None:
                raise wire_forms.raised(frame.error)
    raise EngineLost(f"the engine's process ended before its model was loaded ({how(process)})")


def how(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, which it is about to if it has not."""
    try:
        code = process.wait(2)
    except subprocess.TimeoutExpired:
        return "its socket closed"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
