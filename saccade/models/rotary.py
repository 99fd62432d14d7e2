"""Rotary factors per sequence: what a row's cos and sin are must not depend on what else is in the batch.

transformers picks length-dependent factors (longrope, dynamic NTK) from the largest position in the whole call, and
dynamic NTK even remembers the longest call so far. So we call its rotary module once per regime, and reset that memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.models.interface import Segment

CosSin = tuple[Tensor, Tensor]  # each [1, rows, rotary_dim]


@dataclass(frozen=True)
class RotaryRows:
    """cos and sin of every packed row, one pair per layer type (the key is None where all layers share one)."""

    pairs: dict[str | None, CosSin]
    layer_types: tuple[str, ...] | None

    def for_layer(self, layer: int) -> CosSin:
        """The pair for layer ``layer``."""
        return self.pairs[None if self.layer_types is None else self.layer_types[layer]]


class Rotary:
    """Calls a transformers rotary module (``module(x, position_ids[, layer_type])``) segment by segment where it must."""

    def __init__(self, module: Any, config: Any, *, per_layer_type: bool) -> None:
        self._module = module
        self._layer_types = tuple(config.layer_types) if per_layer_type else None
        parameters = config.rope_parameters
        tables = [parameters[kind] for kind in sorted(set(self._layer_types))] if self._layer_types else [parameters]
        # A checkpoint may keep the trained length beside the rope parameters (Phi-3) or only as the maximum.
        trained = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        self._long_from: int | None = None  # longrope: lengths beyond this use the long factors
        self._grows_from: int | None = None  # dynamic NTK: lengths beyond this have factors of their own
        for table in tables:
            kind = table.get("rope_type", "default")
            if kind == "longrope":
                self._long_from = table.get("original_max_position_embeddings", trained)
            elif "dynamic" in kind:
                self._grows_from = config.max_position_embeddings

    def regime(self, length: int) -> int:
        """Sequences of equal regime share rotary factors; see ``HFRunner.rope_regime``."""
        if self._grows_from is not None and length > self._grows_from:
            return length
        return int(self._long_from is not None and length > self._long_from)

    def embed(self, x: Tensor, positions: Tensor, segments: Sequence[Segment]) -> RotaryRows:
        """cos and sin for ``positions`` [1, rows] in the dtype of ``x``, each row by its own segment's ``rope_length``."""
        kinds: list[str | None] = [None] if self._layer_types is None else sorted(set(self._layer_types))
        return RotaryRows({kind: self._pair(x, positions, segments, kind) for kind in kinds}, self._layer_types)

    def _pair(self, x: Tensor, positions: Tensor, segments: Sequence[Segment], kind: str | None) -> CosSin:
        if self._long_from is None and self._grows_from is None:
            return self._call(x, positions, kind)
        regimes: dict[int, list[Segment]] = {}
        for segment in segments:
            regimes.setdefault(self.regime(segment.rope_length), []).append(segment)
        cos_sin: CosSin | None = None
        for members in regimes.values():
            rows = torch.cat([torch.arange(s.start, s.start + s.length) for s in members]).to(positions.device)
            # One extra row at the regime's last position makes the module pick this regime's factors; it is dropped.
            last = max(s.rope_length for s in members) - 1
            asked = torch.cat([positions[:, rows], positions.new_full((1, 1), last)], dim=1)
            part = tuple(t[:, :-1] for t in self._call(x, asked, kind))
            if cos_sin is None:
                shape = (1, positions.shape[1], part[0].shape[-1])
                cos_sin = part[0].new_empty(shape), part[1].new_empty(shape)
            for whole, piece in zip(cos_sin, part, strict=True):
                whole[:, rows] = piece
        assert cos_sin is not None  # segments tile at least one row
        return cos_sin

    def _call(self, x: Tensor, positions: Tensor, kind: str | None) -> CosSin:
        if self._grows_from is not None:
            self._forget_growth(kind)
        return self._module(x, positions) if kind is None else self._module(x, positions, kind)

    def _forget_growth(self, kind: str | None) -> None:
        # Dynamic NTK keeps the longest length's factors until a shorter-than-trained call; start each call afresh.
        prefix = "" if kind is None else f"{kind}_"
        module = self._module
        original = getattr(module, f"{prefix}original_inv_freq")
        setattr(module, f"{prefix}inv_freq", original.to(getattr(module, f"{prefix}inv_freq").device))
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
