"""The retriever as a checkpoint folder, built once per version into the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from saccade.errors import ModelError
from saccade.models.checkpoint import first_line
from saccade.models.quiet import quiet_transformers
from saccade.models.reference import codes
from saccade.models.reference.retriever import build
from saccade.models.reference.tokenizer import build_tokenizer

NAME = "retriever"
SUMS = "sha256.json"  # of all other files of the folder


def save(path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> Path:
    """Writes config, safetensors, tokenizer with chat template and generation config into the folder ``path``."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    model = build(dtype)
    model.generation_config = GenerationConfig(
        bos_token_id=codes.BOS, eos_token_id=codes.EOS, pad_token_id=codes.PAD, do_sample=False
    )
    with quiet_transformers():
        model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def version() -> str:
    """Twelve hexadecimal digits that change with the recipe: the sources of this package."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def checkpoint() -> Path:
    """The folder of the current version's checkpoint (float32, 14 MB), written on first use.

    It lies in ``$XDG_CACHE_HOME/saccade`` (``~/.cache/saccade``), or in a temporary directory of the user's where that
    cannot be written. A folder that another user owns or may write to is passed over, and one whose files are not what
    was written is built anew. Several processes may call this at once: each writes aside and the first rename wins.
    ModelError where no place can be written.
    """
    name = f"{NAME}-{version()}"
    homes = [_cache_home() / "saccade", Path(tempfile.gettempdir()) / f"saccade-{_user()}"]
    for home in homes:
        if _is_ours(home) and _is_ours(home / name) and _is_whole(home / name):
            return home / name
    refusals = []
    for home in homes:
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_ours(home):
                raise OSError("another user owns it or may write to it")
            _write(home, name)
        except (OSError, SafetensorError) as error:
            refusals.append(f"{home}: {getattr(error, 'strerror', None) or first_line(error)}")
            continue
        return home / name
    raise ModelError(
        f"the built-in model cannot be stored ({'; '.join(refusals)}); free some space, or set XDG_CACHE_HOME to a "
        "folder of yours"
    )


def _write(home: Path, name: str) -> None:
    """Build the checkpoint in ``home``, in the place of a broken one."""
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
    try:
        save(aside / "new")
        sums = {file.name: _sum(file) for file in sorted((aside / "new").iterdir())}
        (aside / "new" / SUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
        if not (_is_ours(home / name) and _is_whole(home / name)):  # else another process was first
            with contextlib.suppress(FileNotFoundError):
                (home / name).rename(aside / "old")
            with contextlib.suppress(OSError):  # the same
                (aside / "new").rename(home / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Whether a folder holds all files that were written to it, as they were."""
    try:
        sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        return all(_sum(folder / file) == digest for file, digest in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _sum(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _is_ours(folder: Path) -> bool:
    """Whether a folder is the user's own, so that nobody else can have put anything into it. A link counts as whose it
    is."""
    try:
        link, target = folder.lstat(), folder.stat()
    except OSError:
        return False
    if not stat.S_ISDIR(target.st_mode):
        return False
    return os.name != "posix" or (link.st_uid == target.st_uid == _user() and not target.st_mode & 0o022)


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
