"""Embeddings of a token that each layer is given for itself (Gemma 3n, Gemma 4): looked up by token, joined with what a
product makes of the embedding that the first layer is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class LayerEmbeddings:
    """Those of ``decoder``, which makes them by its own modules."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    @classmethod
    def of(cls, decoder: Any, config: Any) -> LayerEmbeddings | None:
        """None where a config has no such embedding."""
        return cls(decoder) if config.hidden_size_per_layer_input else None

    def rows(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """``token_ids`` int64 [rows], and their embedding [rows, channels] -> [rows, layers, channels of each]."""
        decoder = self._decoder
        looked_up = decoder.get_per_layer_inputs(token_ids[None], None)
        return decoder.project_per_layer_inputs(hidden[None], looked_up)[0]
