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

from saccade.errors import shown
from saccade.models.interface import Segment
from saccade.models.rotary_table import KEPT, RotaryTable

CosSin = tuple[Tensor, Tensor]  # each [rows, rotary_dim]


@dataclass(frozen=True)
class RotaryRows:
    """cos and sin of every packed row, by layer; layers that rotate alike share theirs."""

    layers: tuple[CosSin, ...]

    def rows(self, layer: int, rows: Tensor) -> CosSin:
        """The pair of ``rows`` int64 [n] for layer ``layer``."""
        cos, sin = self.layers[layer]
        return cos[rows], sin[rows]


class Rotary:
    """Calls a transformers rotary module, ``module(x, position_ids[, layer_type])``, once per regime where it must.
    None of a model that does not rotate: its factors have no columns."""

    def __init__(self, module: Any, config: Any, *, per_layer_type: bool) -> None:
        self._module = module
        self._layer_types = tuple(config.layer_types) if per_layer_type else None
        self._layers = config.num_hidden_layers
        self._tables: dict[tuple[Any, ...], RotaryTable] = {}  # by dtype and layer type, of a CPU's decode steps
        self.long_from: int | None = None  # longrope: lengths beyond this use the long factors
        self._grows_from: int | None = None  # dynamic NTK: lengths beyond this have factors of their own
        kind = rope_type(config)
        if kind == "longrope":
            self.long_from = config.rope_parameters["original_max_position_embeddings"]
        elif "dynamic" in kind:
            self._grows_from = config.max_position_embeddings

    @property
    def by_position(self) -> bool:
        """Whether a row's factors hang on its position alone. If not, ``embed`` asks the segments, on the host."""
        return self.long_from is None and self._grows_from is None

    def regime(self, length: int) -> int:
        """Sequences of equal regime share rotary factors; see ``HFRunner.rope_regime``."""
        if self._grows_from is not None and length > self._grows_from:
            return length
        return int(self.long_from is not None and length > self.long_from)

    def embed(self, x: Tensor, positions: Tensor, segments: Sequence[Segment]) -> RotaryRows:
        """cos, sin for ``positions`` [rows] in the dtype of ``x``, each row by its own segment's ``rope_length``."""
        if self._module is None:
            none = x.new_empty(len(positions), 0)
            return RotaryRows(((none, none),) * self._layers)
        if self._layer_types is not None:
            pairs = {kind: self._by_position(x, positions, kind) for kind in sorted(set(self._layer_types))}
            return RotaryRows(tuple(pairs[kind] for kind in self._layer_types))
        pair = self._by_position(x, positions) if self.by_position else self._by_regime(x, positions, segments)
        return RotaryRows((pair,) * self._layers)

    def _by_position(self, x: Tensor, positions: Tensor, *layer_type: str) -> CosSin:
        """:meth:`_ask`, where a row's factors hang on its position alone; a few rows on a CPU are looked up."""
        if not (x.is_cpu and 0 < len(positions) <= KEPT):
            return self._ask(x, positions, *layer_type)
        key = (x.dtype, *layer_type)
        table = self._tables.get(key)
        if table is None:
            like = x.new_empty(0)
            table = self._tables[key] = RotaryTable(lambda asked: self._ask(like, asked, *layer_type))
        return table.rows(positions)

    def _ask(self, x: Tensor, positions: Tensor, *layer_type: str) -> CosSin:
        asked = positions[None]
        if hasattr(self._module, "mrope_section"):  # of text, time, height and width are one; 5.17 asks for all three
            asked = asked[None].expand(3, -1, -1)
        found = self._module(x, asked, *layer_type)
        cos, sin = (found.real, found.imag) if isinstance(found, Tensor) else found  # complex numbers: DeepSeek-V2's
        return cos[0], sin[0]

    def _by_regime(self, x: Tensor, positions: Tensor, segments: Sequence[Segment]) -> CosSin:
        regimes: dict[int, list[Segment]] = {}
        for segment in segments:
            regimes.setdefault(self.regime(segment.rope_length), []).append(segment)
        rows, parts = [], []
        for members in regimes.values():
            here = torch.cat([torch.arange(s.start, s.start + s.length) for s in members]).to(positions.device)
            # One extra row at the regime's last position makes the module pick this regime's factors; it is dropped.
            last = max(s.rope_length for s in members) - 1
            asked = torch.cat([positions[here], positions.new_full((1,), last)])
            if self._grows_from is not None:
                self._forget_growth()
            cos, sin = self._ask(x, asked)
            rows.append(here)
            parts.append((cos[:-1], sin[:-1]))
        order = torch.argsort(torch.cat(rows))  # back from regime order to row order
        return torch.cat([cos for cos, _ in parts])[order], torch.cat([sin for _, sin in parts])[order]

    def _forget_growth(self) -> None:
        # Dynamic NTK keeps the longest length's factors until a shorter-than-trained call; start each call afresh.
        module = self._module
        module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
        module.max_seq_len_cached = module.original_max_seq_len


def rope_type(config: Any) -> str:
    """The rope type of a config whose layers share one; "per_layer_type" where each type has its own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not isinstance(parameters, dict):
        return shown(parameters, 40)
    if any(isinstance(value, dict) for value in parameters.values()):
        return "per_layer_type"
    return str(parameters.get("rope_type", "default"))
