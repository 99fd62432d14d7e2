"""Writing files whole or not at all: what is read later was never half written."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from saccade.errors import RequestError


@contextmanager
def written_whole(path: Path, what: str = "") -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` once the block ends without an error. Its folder is made.

    What is no regular file (a terminal, a pipe) and what lies in a folder that takes no new files is written in place.
    RequestError naming ``what`` and the path where the system refuses: no space, no permission.
    """
    name = f"{what} {path}".strip()
    try:
        target = Path(os.path.realpath(path))  # a link stays one
        mode = _mode(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if mode is not None and not (stat.S_ISREG(mode) and os.access(target.parent, os.W_OK)):
            yield target
            return
        aside = target.with_name(f".{secrets.token_hex(8)}.part")
        try:
            yield aside
            if mode is not None:
                aside.chmod(stat.S_IMODE(mode))
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"{name} cannot be written: {error.strerror or error}") from error


def write_text(path: Path, text: str, what: str = "") -> None:
    """``text`` in UTF-8, lines ending as they do (see :func:`written_whole`)."""
    with written_whole(path, what) as aside:
        aside.write_text(text, encoding="utf-8", newline="\n")


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder of that name; no name that the system refuses is one."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
