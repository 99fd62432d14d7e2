"""Conversations kept under a name, and ``saccade sessions``, which lists and removes them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from saccade.errors import RequestError, shown

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".session"


def folder() -> Path:
    """Where they lie: ``$XDG_STATE_HOME/saccade/sessions`` (``~/.local/state/saccade/sessions``)."""
    configured = os.environ.get("XDG_STATE_HOME")
    try:
        home = Path(configured) if configured else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise RequestError("there is no home directory to keep sessions in; set XDG_STATE_HOME to a folder") from error
    return home / "saccade" / "sessions"


def path_of(name: str) -> Path:
    """The file of a name; RequestError for what is none."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"session={shown(name)} must be 1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit"
        )
    return folder() / f"{name}{_SUFFIX}"


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes out of a session. RequestError where one has it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(path.with_suffix(".lock"), "w", encoding="utf-8")  # noqa: SIM115  (closed below)
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
                f"another process talks in the session '{path.stem}'; end it, or take another name"
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
        if not path.is_file():
            raise RequestError(f"there is no session '{name}' in {folder()}; saccade sessions lists them")
        with held(path):
            path.unlink()
        path.with_suffix(".lock").unlink(missing_ok=True)
        print(f"removed {name}")
    if remove:
        return
    from saccade.machine import show_bytes

    files = sorted(folder().glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime)
    for path in files:
        facts = path.stat()
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.st_mtime))
        print(f"{path.stem:30}  {saved}  {show_bytes(facts.st_size):>10}")
    if not files:
        print(f"no sessions in {folder()}; saccade chat --session NAME keeps one")
