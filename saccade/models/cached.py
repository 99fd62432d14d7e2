"""Checkpoint folders in the user's cache: written aside, with a list of what was written, and put in place by a rename.

So a folder is there whole or not at all, however many processes write it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from saccade.errors import ModelError

SUMS = "sha256.json"  # sha256 and bytes of all other files of a folder


def cache_homes() -> list[Path]:
    """Where folders may lie: ``$XDG_CACHE_HOME/saccade`` (``~/.cache/saccade``), or a temporary directory of the
    user's where that cannot be written."""
    return [_cache_home() / "saccade", Path(tempfile.gettempdir()) / f"saccade-{_user()}"]


def find(name: str, sums: bool = True) -> Path | None:
    """The folder ``name`` of the cache, if it is the user's own and whole. Without ``sums`` only the files' sizes are
    looked at, for folders of a size that takes seconds to read."""
    for home in cache_homes():
        folder = home / name
        if is_ours(home) and is_ours(folder) and is_whole(folder, sums):
            return folder
    return None


def cached(name: str, build: Callable[[Path], object], what: str, *, sums: bool = True, need: int = 0) -> Path:
    """The folder ``name`` of the cache, made by ``build(folder)`` on first use and where it is broken.

    A folder that another user owns or may write to is passed over. ``need``: bytes that it takes. ModelError, naming
    ``what``, where no place can be written.
    """
    found = find(name, sums)
    if found is not None:
        return found
    refusals = []
    for home in cache_homes():
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not is_ours(home):
                raise OSError("another user owns it or may write to it")
            if (free := shutil.disk_usage(home).free) < need:
                raise OSError(f"{need / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")
            put(home / name, build, sums)
        except (OSError, SafetensorError) as error:
            from saccade.models.checkpoint import first_line  # which imports torch

            refusals.append(f"{home}: {getattr(error, 'strerror', None) or first_line(error)}")
            continue
        return home / name
    raise ModelError(
        f"{what} cannot be stored ({'; '.join(refusals)}); free some space, or set XDG_CACHE_HOME to a folder of yours"
    )


def put(folder: Path, build: Callable[[Path], object], sums: bool = True) -> None:
    """Make ``folder`` by ``build``, in the place of a broken one; a whole one stays. OSError if the system refuses."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        new = aside / "new"  # which build makes
        build(new)
        listed = {file.name: {"sha256": digest(file), "bytes": _synced(file)} for file in sorted(new.iterdir())}
        (new / SUMS).write_text(json.dumps(listed, indent=1), encoding="utf-8")
        if not (is_ours(folder) and is_whole(folder, sums)):  # else another process was first
            with contextlib.suppress(FileNotFoundError):
                folder.rename(aside / "old")
            with contextlib.suppress(OSError):  # the same
                new.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_whole(folder: Path, sums: bool = True) -> bool:
    """Whether a folder holds all files that were written to it, as they were (without ``sums``: as long as then)."""
    try:
        listed = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        return all(
            (folder / name).stat().st_size == facts["bytes"] and (not sums or digest(folder / name) == facts["sha256"])
            for name, facts in listed.items()
        )
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return False


def digest(file: Path) -> str:
    """A file's SHA-256 in hexadecimal digits."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def is_ours(folder: Path) -> bool:
    """Whether a folder is the user's own, so that no other user can have put anything into it. A link counts as whose
    it is."""
    try:
        link, target = folder.lstat(), folder.stat()
    except OSError:
        return False
    if not stat.S_ISDIR(target.st_mode):
        return False
    return os.name != "posix" or (link.st_uid == target.st_uid == _user() and not target.st_mode & 0o022)


def _synced(file: Path) -> int:
    """Bytes of a file that are on the disk before the folder gets its name."""
    with file.open("rb") as data:
        with contextlib.suppress(OSError):  # some file systems have no such call
            os.fsync(data.fileno())
        return os.fstat(data.fileno()).st_size


def _user() -> int:
    return getattr(os, "getuid", lambda: 0)()


def _cache_home() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME")
    if configured:
        return Path(configured)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return Path(tempfile.gettempdir())
