"""The retriever as a checkpoint folder, built once per version into the user's cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from transformers import GenerationConfig

from saccade.models.cached import cached
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
    """The folder of the current version's checkpoint (float32, 14 MB), written on first use (see models/cached.py).

    ModelError where no place can be written.
    """
    return cached(f"{NAME}-{version()}", save, "the built-in model")
