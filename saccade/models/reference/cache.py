"""The retriever as a checkpoint folder, built once per version into the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig

from saccade.models.quiet import quiet_transformers
from saccade.models.reference import codes
from saccade.models.reference.retriever import build
from saccade.models.reference.tokenizer import build_tokenizer

NAME = "retriever"


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
    cannot be written. Several processes may call this at once: each writes aside and the first rename wins.
    """
    name = f"{NAME}-{version()}"
    uid = getattr(os, "getuid", lambda: 0)()
    homes = [_cache_home() / "saccade", Path(tempfile.gettempdir()) / f"saccade-{uid}"]
    for home in homes:
        if (home / name / "config.json").is_file():
            return home / name
    for home in homes:
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
        except OSError:
            continue
        try:
            save(aside)
            with contextlib.suppress(OSError):  # another process was first
                aside.rename(home / name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return home / name
    raise OSError(f"no place to write the reference model: tried {' and '.join(map(str, homes))}")


def _cache_home() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME")
    if configured:
        return Path(configured)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return Path(tempfile.gettempdir())
