"""Where records lie: a small protocol, and the store of files that is built in."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from saccade.errors import RequestError, SaccadeError, shown
from saccade.machine import no_room

_KEY = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}(/[a-z0-9][a-z0-9_-]{0,127})?")
_ASIDE = ".part"
LOCK = "lock"
WAIT = 2.0  # seconds for it


@dataclass(frozen=True)
class Entry:
    """What a store says of one key. ``size``: bytes; ``used``: when it was last written or got, seconds since the
    epoch."""

    key: str
    size: int
    used: float


class BlockStore(Protocol):
    """Bytes by key. A key is ``group/name`` or ``name``, of lower-case letters, digits, ``-`` and ``_``.

    ``put`` puts the whole content in the place of what is there, or nothing. What is got may be torn all the same,
    after a power failure say: readers check it. Every method may be called from any thread, and raises
    SaccadeError where the store fails.
    """

    def get(self, key: str) -> Any:
        """The content, as a buffer of the caller's own; None where there is none."""

    def put(self, key: str, content: bytes) -> None:
        """Store ``content``."""

    def delete(self, key: str) -> None:
        """Forget a key; nothing happens where there is none."""

    def exists(self, key: str) -> bool:
        """Whether there is one."""

    def list(self) -> Iterable[Entry]:
        """All there is, in any order."""

    def close(self) -> None:
        """Let others have it. Nothing can be asked any more."""


class InUse(RequestError):
    """Another process has the folder."""


class Files:
    """A file for each key under the folder ``path``. A file is written beside the old one, brought to the disk and
    takes its place whole. When it was written is its time of change, when it was last used its time of access.

    A group's folder that is a link to another is none: what it leads to is not read, written or removed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, key: str, touch: bool = True) -> Any:
        """See BlockStore. ``touch``: it counts as a use."""
        path = self._path(key)
        if self._leads_away(path):
            return None
        try:
            with open(path, "rb", buffering=0) as file:
                facts = os.fstat(file.fileno())
                content = np.empty(facts.st_size, dtype=np.uint8)  # a bytearray would be zeroed first
                view, have = memoryview(content), 0  # type: ignore[arg-type]
                while have < len(content):
                    got = file.readinto(view[have:])
                    if not got:
                        break
                    have += got
                if touch:
                    os.utime(file.fileno(), ns=(time.time_ns(), facts.st_mtime_ns))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
        return view[:have]

    def put(self, key: str, content: bytes) -> None:
        """See BlockStore."""
        path = self._path(key)
        if self._leads_away(path):
            raise RequestError(f"{path.parent} is a link to another folder, and nothing is written there; remove it")
        aside = path.with_name(f".{secrets.token_hex(8)}{_ASIDE}")
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            try:
                with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                    view = memoryview(content)
                    while len(view):
                        view = view[file.write(view) :]
                    os.fsync(file.fileno())
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
            _bring_to_disk(path.parent)
        except OSError as error:
            why = f"{error.strerror or error}{no_room(error, self.path, len(content))}"
            raise RequestError(f"{path} cannot be written: {why}") from error

    def delete(self, key: str) -> None:
        """See BlockStore."""
        path = self._path(key)
        if self._leads_away(path):
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RequestError(f"{path} cannot be removed: {error.strerror or error}") from error
        if path.parent != self.path:
            with contextlib.suppress(OSError):  # something is left in it, or another process was first
                path.parent.rmdir()

    def exists(self, key: str) -> bool:
        """See BlockStore. What may not be looked at is not there."""
        path = self._path(key)
        try:
            return path.is_file() and not self._leads_away(path)
        except OSError:
            return False

    def written(self, key: str) -> int | None:
        """When a key was put, nanoseconds since the epoch; None where there is none."""
        try:
            path = self._path(key)
            return None if self._leads_away(path) else path.stat().st_mtime_ns
        except OSError:
            return None

    def list(self) -> list[Entry]:
        """See BlockStore."""
        entries = []
        for path in (*self.path.glob("*"), *self.path.glob("*/*")):
            key = path.relative_to(self.path).as_posix()
            if key == LOCK or not _KEY.fullmatch(key) or self._leads_away(path):
                continue
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            if path.is_file():
                entries.append(Entry(key, facts.st_size, max(facts.st_mtime, facts.st_atime)))
        return entries

    def _leads_away(self, path: Path) -> bool:
        """Whether a file lies in a folder of another owner, to which a link in this one leads."""
        return path.parent != self.path and path.parent.is_symlink()

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key) or key == LOCK:
            raise SaccadeError(
                f"key={shown(key)} must be lower-case letters, digits, '-' and '_', or two such with a /"
            )
        return self.path / key


class FileStore(Files):
    """The files of a folder that one process at a time has. Only its owner can read them.

    What a process that was killed left half written is removed when the folder is opened. InUse where another process
    has the folder for ``wait`` seconds, RequestError where the system refuses.
    """

    def __init__(self, path: str | Path, wait: float = WAIT) -> None:
        super().__init__(Path(path).expanduser())
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._unlock = weakref.finalize(self, os.close, locked(self.path / LOCK, wait))
            for left in (*self.path.glob(f".*{_ASIDE}"), *self.path.glob(f"*/.*{_ASIDE}")):
                if not self._leads_away(left):
                    left.unlink(missing_ok=True)
        except OSError as error:
            raise RequestError(f"{self.path} cannot hold sessions: {error.strerror or error}") from error

    def close(self) -> None:
        """See BlockStore."""
        self._unlock()

    def _path(self, key: str) -> Path:
        if not self._unlock.alive:
            raise SaccadeError(f"{self.path} was closed")
        return super()._path(key)


def locked(path: Path, wait: float = WAIT, shared: bool = False) -> int:
    """A descriptor of the lock file, which holds the lock until it is closed or the process ends. ``shared``: with
    others that share it. A process that was killed may take a moment to end, so another's lock is waited for. InUse
    where it is not to be had."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + wait
    while not _lock(descriptor, shared):
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        if owner == str(os.getpid()) or time.monotonic() >= until:
            os.close(descriptor)
            other = f"another process ({owner})" if owner else "another process"
            raise InUse(f"{path.parent} is in use by {other}; end it, or give another folder")
        time.sleep(0.02)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _lock(descriptor: int, shared: bool) -> bool:
    """Take the lock; False where another has it."""
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except ImportError:  # no POSIX system: who wrote last has written
        pass
    except OSError:
        return False
    return True


def _bring_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
