"""Conversations kept under a name, and ``saccade sessions``, which lists and removes them."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from saccade.errors import RequestError, shown

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OLDER = ".session"  # files, as they were before folders


def folder() -> Path:
    """Where they lie: ``$XDG_STATE_HOME/saccade/sessions`` (``~/.local/state/saccade/sessions``)."""
    configured = os.environ.get("XDG_STATE_HOME")
    try:
        home = Path(configured) if configured else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise RequestError("there is no home directory to keep sessions in; set XDG_STATE_HOME to a folder") from error
    return home / "saccade" / "sessions"


def path_of(name: str) -> Path:
    """The folder of a name; RequestError for what is none."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"session={shown(name)} must be 1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit"
        )
    return folder() / name


def older_file(path: Path) -> Path:
    """Where an earlier version kept the session of a folder."""
    return path.with_name(path.name + _OLDER)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes out of a session. RequestError where one has it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(_lock_of(path), "w", encoding="utf-8")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise RequestError(f"{path.parent} cannot be written: {error.strerror or error}") from error
    with lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no POSIX system: who saved last has saved
            pass
        except OSError as error:
            raise RequestError(
                f"another process talks in the session '{path.name}'; end it, or take another name"
            ) from error
        yield


def sessions(
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Delete this one; may be given often.")] = None,
) -> None:
    """List the conversations that saccade chat --session keeps, or remove some.

    saccade sessions --remove NAME
    """
    for name in remove or ():
        path = path_of(name)
        if not path.is_dir() and not older_file(path).is_file():
            raise RequestError(f"there is no session '{name}' in {folder()}; saccade sessions lists them")
        with held(path):
            shutil.rmtree(path, ignore_errors=True)
            older_file(path).unlink(missing_ok=True)
        _lock_of(path).unlink(missing_ok=True)
        print(f"removed {name}")
    if remove:
        return
    from saccade.machine import show_bytes

    listed = sorted(_stored(), key=lambda one: -one[1])
    for name, when, size in listed:
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
        print(f"{name:30}  {saved}  {show_bytes(size):>10}")
    if not listed:
        print(f"no sessions in {folder()}; saccade chat --session NAME keeps one")


def _stored() -> Iterator[tuple[str, float, int]]:
    """Name, time of the last save and bytes of each session."""
    for path in folder().glob("*"):
        name = path.name.removesuffix(_OLDER) if path.is_file() else path.name
        records = [path] if path.is_file() and path.name.endswith(_OLDER) else list(path.glob("*/*"))
        facts = [one.stat() for one in records]
        if facts and _NAME.fullmatch(name):
            yield name, max(one.st_mtime for one in facts), sum(one.st_size for one in facts)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
