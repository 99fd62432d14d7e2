"""Where records lie: a small protocol, and the store of files that is built in."""

from __future__ import annotations

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

_KEY = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}(/[a-z0-9][a-z0-9_-]{0,127})?")
_ASIDE = ".part"
WAIT = 2.0  # seconds for a lock


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
    after a power failure say: whoever reads checks it. Every method may be called from any thread, and raises
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


class FileStore:
    """A file for each key under the folder ``path``, which one process at a time has. Only its owner can read them.

    A file is written beside the old one, brought to the disk and takes its place whole; what a process that was killed
    left half written is removed when the folder is opened. RequestError where another process has the folder, or the
    system refuses.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._unlock = weakref.finalize(self, os.close, _locked(self.path / "lock"))
            for left in (*self.path.glob(f".*{_ASIDE}"), *self.path.glob(f"*/.*{_ASIDE}")):
                left.unlink(missing_ok=True)
        except OSError as error:
            raise RequestError(f"{self.path} cannot hold sessions: {error.strerror or error}") from error

    def get(self, key: str) -> Any:
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                content = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)  # a bytearray would be zeroed first
                view, have = memoryview(content), 0  # type: ignore[arg-type]
                while have < len(content):
                    got = file.readinto(view[have:])
                    if not got:
                        break
                    have += got
                os.utime(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
        return view[:have]

    def put(self, key: str, content: bytes) -> None:
        path = self._path(key)
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
            raise RequestError(f"{path} cannot be written: {error.strerror or error}") from error

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            if path.parent != self.path and path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()
        except OSError as error:
            raise RequestError(f"{path} cannot be removed: {error.strerror or error}") from error

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def list(self) -> list[Entry]:
        entries = []
        for path in (*self.path.glob("*"), *self.path.glob("*/*")):
            key = path.relative_to(self.path).as_posix()
            if key == "lock" or not _KEY.fullmatch(key):
                continue
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            if path.is_file():
                entries.append(Entry(key, facts.st_size, facts.st_mtime))
        return entries

    def close(self) -> None:
        self._unlock()

    def _path(self, key: str) -> Path:
        if not self._unlock.alive:
            raise SaccadeError(f"{self.path} was closed")
        if not _KEY.fullmatch(key) or key == "lock":
            raise SaccadeError(
                f"key={shown(key)} must be lower-case letters, digits, '-' and '_', or two such with a /"
            )
        return self.path / key


def _locked(path: Path) -> int:
    """A descriptor of the lock file, which holds the lock until it is closed or the process ends. A process that was
    killed may take a moment to end, so another's lock is waited for."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + WAIT
    while not _lock(descriptor):
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        if owner == str(os.getpid()) or time.monotonic() > until:
            os.close(descriptor)
            other = f"another process ({owner})" if owner else "another process"
            raise RequestError(f"{path.parent} is in use by {other}; end it, or give another folder")
        time.sleep(0.02)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _lock(descriptor: int) -> bool:
    """Take the lock; False where another has it."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
