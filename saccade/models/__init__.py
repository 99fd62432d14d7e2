"""Models: load a local checkpoint folder and run packed rows of many sequences through it.

All but names of models pulls in torch, and the loader transformers, which take seconds to import; so each is fetched on
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.models.interface import AttentionContext, LayerAttention, ModelSpec, Segment
    from saccade.models.loader import LoadedModel, load_model
    from saccade.models.runner import HFRunner
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

_LAZY = {
    **dict.fromkeys(("AttentionContext", "LayerAttention", "ModelSpec", "Segment"), "interface"),
    "HFRunner": "runner",
    **dict.fromkeys(("LoadedModel", "load_model"), "loader"),
    **dict.fromkeys(("TextStream", "Tokenizer"), "tokenizer"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
