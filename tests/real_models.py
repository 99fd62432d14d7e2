"""Pretrained models for tests that are marked ``real``, where they are on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from saccade.models.cached import is_whole
from saccade.models.catalogue import ENTRIES

FOLDER = Path(os.environ.get("SACCADE_REAL", Path(__file__).parent.parent / "build" / "real"))


def real_model(name: str) -> Path:
    """Its checkpoint folder: of ``make real`` (``$SACCADE_REAL``), or of the cache. The test is skipped without one."""
    made = FOLDER / name
    folder = made if is_whole(made, sums=False) else ENTRIES[name].folder
    if folder is None:
        pytest.skip(f"needs {name}: make real MODELS={name}, or saccade fetch {name}")
    return folder


def real_gguf(name: str) -> Path:
    """Its GGUF file, which ``make real`` keeps. The test is skipped without it."""
    if not (file := FOLDER / f"{name}.gguf").is_file():
        pytest.skip(f"needs {file}: make real MODELS={name}")
    return file
