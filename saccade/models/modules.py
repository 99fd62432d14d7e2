"""The layers of any checked family as transformers' modules: the oracle of ``models.llama``, and what runs all other
shapes."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import Tensor

from saccade.models.interface import AttentionContext, LayerAttention
from saccade.models.rotary import CosSin


class ModuleLayers:
    """``layers`` are a decoder's, loaded with ``attn_implementation="saccade"``; those ``keeping`` have a state."""

    def __init__(self, layers: Any, keeping: Container[int] = ()) -> None:
        self.layers, self._keeping = layers, keeping

    def run(
        self,
        index: int,
        hidden: Tensor,
        positions: Tensor,
        pair: CosSin,
        ctx: AttentionContext,
        pieces: Any = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """One layer over ``hidden`` [rows, channels] at ``positions`` [rows] -> [rows, channels]. ``pieces``: the
        states of the rows' sequences (models.keeping). ``embedded`` [rows, layers, channels]: what each layer is given
        beside that (models.layer_embeddings)."""
        cos, sin = pair
        given = {"past_key_values": pieces} if index in self._keeping else {}
        if embedded is not None:
            given["per_layer_input"] = embedded[None, :, index]
        made = self.layers[index](
            hidden[None],
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=(cos[None], sin[None]) if cos.shape[-1] else None,  # it does not rotate
            saccade=ctx,
            **given,
        )
        return made[0][0] if isinstance(made, tuple) else made[0]

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
