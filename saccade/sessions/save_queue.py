"""Saves in the background, one after the other, of which only the last of each kind counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class SaveQueue:
    """Runs saves on a thread of its own, in their order; one is left out where another under its key has been asked for
    since. Every method may be called from any thread."""

    def __init__(self, thread: str) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, Future[None]] = {}  # by key, until it has ended
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=thread)

    def submit(self, key: str, save: Callable[[], None]) -> Future[None]:
        """Have ``save``, which raises nothing, run; what is returned is done once it has, or was left out: at once when
        this is closed."""
        saving: Future[None] = Future()
        with self._lock:
            self._last[key] = saving
        try:
            self._writer.submit(self._run, key, saving, save)
        except RuntimeError:  # closed
            self._done(key, saving)
        return saving

    def pending(self, key: str) -> Future[None] | None:
        """The last save under ``key``, if it has not ended."""
        with self._lock:
            return self._last.get(key)

    def wait(self, key: str) -> None:
        """Wait until the last save under ``key`` has ended."""
        pending = self.pending(key)
        if pending is not None:
            pending.result()

    def flush(self) -> None:
        """Wait until there is nothing to save."""
        while True:
            with self._lock:
                pending = list(self._last.values())
            if not pending:
                return
            for one in pending:
                one.result()

    def close(self) -> None:
        """Save what there is and end the thread."""
        self.flush()
        self._writer.shutdown()

    def _run(self, key: str, saving: Future[None], save: Callable[[], None]) -> None:
        try:
            if self.pending(key) is saving:
                save()
        finally:
            self._done(key, saving)

    def _done(self, key: str, saving: Future[None]) -> None:
        with self._lock:
            if self._last.get(key) is saving:
                del self._last[key]
        saving.set_result(None)
