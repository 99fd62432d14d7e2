"""Ranks as threads of the tests' own process, which join over gloo as processes do: for tests of what is computed,
since a process takes seconds to begin."""

from __future__ import annotations

import os
import subprocess
import threading
import types
from collections.abc import Sequence

from saccade import ranks


class Thread:
    """As ``subprocess.Popen`` of a rank."""

    def __init__(self, command: Sequence[str], **asked: object) -> None:
        assert tuple(command[1:]) == ranks.COMMAND
        reading, writing = os.pipe()
        self.stdin, self.pid, self.returncode = os.fdopen(writing, "wb", 0), os.getpid(), None
        self._thread = threading.Thread(target=self._run, args=(reading,), daemon=True)
        self._thread.start()

    def _run(self, reading: int) -> None:
        try:
            with os.fdopen(reading, "rb") as stream:
                messages = ranks.received(stream)
                ranks.serve(next(messages), messages)
            self.returncode = 0
        except BaseException:
            self.returncode = 1
            raise

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0)
        return self.returncode

    def kill(self) -> None:
        """It ends with its input."""


SUBPROCESS = types.SimpleNamespace(**{**vars(subprocess), "Popen": Thread})  # for saccade.ranks in place of subprocess
