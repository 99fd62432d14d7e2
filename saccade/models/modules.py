"""The layers of any checked family as transformers' modules: the oracle of ``models.llama``, and what runs all other
shapes."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import Tensor

from saccade.models.attention import ELSEWHERE, Elsewhere
from saccade.models.interface import AttentionContext, LayerAttention
from saccade.models.rebuilt import cache_argument
from saccade.models.rotary import CosSin


class ModuleLayers:
    """``layers`` are a decoder's, loaded with ``attn_implementation="saccade"``; those ``keeping`` have a state. Where
    they are of a family that ``shares`` keys, some ask for those of an earlier one."""

    def __init__(self, layers: Any, keeping: Container[int] = (), shares: bool = False) -> None:
        self.layers, self._keeping, self._shares = layers, keeping, shares
        self._cache = next((cache_argument(one.forward) for at, one in enumerate(layers) if at in keeping), "")

    def run(
        self,
        index: int,
        hidden: Tensor,
        positions: Tensor,
        pair: CosSin,
        ctx: AttentionContext,
        pieces: Any = None,
        beside: Tensor | None = None,
    ) -> Tensor:
        """One layer over ``hidden`` [rows, channels], or [rows, streams, channels], at ``positions`` [rows] -> the
        same. ``pieces``: the states of the rows' sequences (models.keeping); ``beside`` [rows, n]: what it is given of
        each token besides (models.streams)."""
        cos, sin = pair
        streams = hidden.dim() == 3
        given: dict[str, Any] = {self._cache: pieces} if index in self._keeping else {}
        if self._shares:
            given["shared_kv_states"] = _STORED
        if beside is not None:
            given["per_layer_input"] = beside[None]
        made = self.layers[index](
            hidden.transpose(0, 1)[:, None] if streams else hidden[None],
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=(cos[None], sin[None]) if cos.shape[-1] else None,  # it does not rotate
            saccade=ctx,
            **given,
        )
        if streams:
            rows: Tensor = made[:, 0].transpose(0, 1)
            return rows
        return made[0][0] if isinstance(made, tuple) else made[0]

    def project(
        self, index: int, hidden: Tensor, positions: Tensor, pair: CosSin
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What a layer would hand to its attention for these rows: [heads or kv_heads, rows, head_dim]; no keys and
        values of one that reads others'."""
        seen = _Projections()
        try:
            self.run(index, hidden, positions, pair, seen)
        except _Seen:
            return seen.parts
        raise RuntimeError(f"layer {index} did not attend")


class _Stored:
    """In place of the keys and values that layers leave for later ones, by type, or up to transformers 5.17 by number:
    those are where attention finds them."""

    def __getitem__(self, kind: str | int) -> tuple[Elsewhere, Elsewhere]:
        return ELSEWHERE, ELSEWHERE

    def __setitem__(self, kind: str | int, new: tuple[Tensor, Tensor]) -> None:
        pass


_STORED = _Stored()


class _Seen(Exception):
    """Leaves a layer in the middle, once its projections are known: what follows them is not wanted."""


class _Projections:
    """An attention context that notes what a layer hands to it and goes no further. Norms, projections and rotations
    differ between families; what each hands to attention does not."""

    parts: tuple[Tensor, Tensor | None, Tensor | None]

    def run(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, spec: LayerAttention) -> Tensor:
        self.parts = q, k, v
        raise _Seen

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError
