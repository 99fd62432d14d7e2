"""A store that several processes have at once: replicas of a server, on one machine or on a file system of several."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.errors import RequestError
from saccade.sessions.stores import LOCK, Entry, Files, FileStore, InUse, locked

MOST = 4096  # processes
_PLACE = "process."  # no key has a dot: a store of one process alone never takes these for its own


class SharedFileStore:
    """Each process writes in a folder of its own under ``path``, ``process.0`` and so on, and reads all of them.

    A process that begins takes the first folder without an owner, of an ended one too, with what is in it. So no
    process writes where another does, and what a dead process stored is there for all. What was stored later wins.
    ``list``,
    ``delete`` and a bound on the size are of this process's folder; :meth:`forget` reaches all. What a store of one
    process left in ``path`` is read, too. InUse where such a one has ``path`` now, RequestError where the system
    refuses.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._unlock = weakref.finalize(self, os.close, locked(self.path / LOCK, shared=True))
        except OSError as error:
            raise RequestError(f"{self.path} cannot hold sessions: {error.strerror or error}") from error
        try:
            self._own = self._first_free()
        except BaseException:
            self._unlock()
            raise

    def get(self, key: str) -> Any:
        """See BlockStore: the last that any process put."""
        found = [(one.written(key) or 0, one) for one in self._others() if one.exists(key)]
        mine = self._own.written(key)
        last, other = max(found, key=lambda pair: pair[0], default=(-1, None))
        if other is not None and (mine is None or last > mine):
            content = other.get(key, touch=False)
            if content is not None:  # else its owner has removed it since
                return content
        return self._own.get(key)

    def written(self, key: str) -> int | None:
        """When this process put a key, nanoseconds since the epoch; None where it has none."""
        return self._own.written(key)

    def last_written(self, key: str) -> int | None:
        """When any process put a key last."""
        return max(filter(None, (one.written(key) for one in (self._own, *self._others()))), default=None)

    def put(self, key: str, content: bytes) -> None:
        """See BlockStore."""
        self._own.put(key, content)

    def delete(self, key: str) -> None:
        """Forget what this process has of a key."""
        self._own.delete(key)

    def exists(self, key: str) -> bool:
        """Whether any process has one."""
        return self._own.exists(key) or any(one.exists(key) for one in self._others())

    def list(self) -> list[Entry]:
        """What this process has."""
        return self._own.list()

    def forget(self, head: str) -> bool:
        """Remove from every folder the record ``head``, ``group/name``, and then all others of its group; False where
        there is none. A process that has them open may store them again."""
        group, found = head.partition("/")[0], False
        for one in (self._own, *self._others()):
            folder = one.path / group
            held = [] if folder.is_symlink() else folder.glob("*")  # what a link leads to belongs to others
            names = [path.name for path in held if not path.name.startswith(".")]
            for key in sorted((f"{group}/{name}" for name in names), key=lambda key: key != head):
                one.delete(key)
            found |= bool(names)
        return found

    def close(self) -> None:
        """Let others have this process's folder."""
        self._own.close()
        self._unlock()

    def _first_free(self) -> FileStore:
        for number in range(MOST):
            place = self.path / f"{_PLACE}{number}"
            if place.is_symlink():
                continue
            try:
                return FileStore(place, wait=0.0)
            except InUse:
                continue
        raise RequestError(f"{self.path} is in use by {MOST} processes; give another folder")

    def _others(self) -> Iterator[Files]:
        """What others have, or had, and what lies in the folder itself."""
        yield Files(self.path)
        for path in self.path.glob(f"{_PLACE}*"):
            if path != self._own.path and not path.is_symlink():
                yield Files(path)
