"""Models: load a local checkpoint folder and run packed rows of many sequences through it.

The loader pulls in transformers, which takes seconds to import; so it is fetched on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saccade.models.interface import AttentionContext, LayerAttention, ModelSpec, Segment
from saccade.models.runner import HFRunner

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel, load_model
    from saccade.models.tokenizer import TextStream, Tokenizer

__all__ = [
    "AttentionContext",
    "HFRunner",
    "LayerAttention",
    "LoadedModel",
    "ModelSpec",
    "Segment",
    "TextStream",
    "Tokenizer",
    "load_model",
]

_LAZY = {"LoadedModel": "loader", "load_model": "loader", "TextStream": "tokenizer", "Tokenizer": "tokenizer"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
