"""Fixtures that several test files share: tiny random checkpoints, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

# Tiny models gain nothing from threads, and on a busy machine waiting for them costs minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama: 3 layers, 4 query heads over 2 KV heads, room for 2048 positions, byte tokenizer."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("tiny_llama"), max_position_embeddings=2048)
