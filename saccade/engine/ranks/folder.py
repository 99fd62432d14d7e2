"""The folder in which the ranks of one engine find each other."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "saccade-ranks-"
OWNER = "owner"  # a file that the first rank's process has locked while it lives


class RankFolder:
    """A folder of its own, which only this user can read, until it is removed. One whose process was killed is removed
    when the next is made: the system gives its lock back, however the process ended."""

    def __init__(self) -> None:
        remove_left()
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        self._lock = os.open(made / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name[1:]))  # so no other process finds it without its lock

    @property
    def store(self) -> Path:
        """Where ranks find each other."""
        return self.path / "store"

    def remove(self) -> None:
        """Once; nothing is left of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left() -> None:
    """Remove what processes left that were killed: folders of this user that no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it has an owner, or is another user's, or goes just now
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.stat().st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def counts_path(store: Path) -> Path:
    """Where ranks that find each other at ``store`` count the sums that they have come to."""
    return store.with_name("counts")


def steps_path(store: Path) -> Path:
    """Where they count the steps that they have begun and ended."""
    return store.with_name("steps")


def ready(rank: int) -> str:
    """The key under which a rank says that it has loaded its model."""
    return f"ready/{rank}"


def failed(rank: int) -> str:
    """The key under which a rank says why it has not, or why it ends."""
    return f"failed/{rank}"
