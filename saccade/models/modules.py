"""The layers of any checked family as transformers' modules: the oracle of ``models.llama``, and what runs all other
shapes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.models.interface import AttentionContext, LayerAttention
from saccade.models.rotary import CosSin


class ModuleLayers:
    """``layers`` are a decoder's, loaded with ``attn_implementation="saccade"``."""

    def __init__(self, layers: Any) -> None:
        self.layers = layers

    def run(self, index: int, hidden: Tensor, positions: Tensor, pair: CosSin, ctx: AttentionContext) -> Tensor:
        """One layer over ``hidden`` [rows, channels] at ``positions`` [rows] -> [rows, channels]."""
        cos, sin = pair
        return self.layers[index](
            hidden[None],
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=(cos[None], sin[None]),
            saccade=ctx,
        )[0]

    def project(self, index: int, hidden: Tensor, positions: Tensor, pair: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """What a layer would hand to its attention for these rows: [heads or kv_heads, rows, head_dim]."""
        seen = _Projections()
        try:
            self.run(index, hidden, positions, pair, seen)
        except _Seen:
            return seen.parts
        raise RuntimeError(f"layer {index} did not attend")


class _Seen(Exception):
    """Leaves a layer in the middle, once its projections are known: what follows them is not wanted."""


class _Projections:
    """An attention context that notes what a layer hands to it and goes no further. Norms, projections and rotations
    differ between families; what each hands to attention does not."""

    parts: tuple[Tensor, Tensor, Tensor]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        self.parts = q, k, v
        raise _Seen

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError
