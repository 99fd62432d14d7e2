"""The tap: where a recorded step leaves each layer's queries, results and log-sum-exps for audits, as the step's own
kernels have written them. Nothing is copied: while these tensors are held a recording keeps its memory to itself, and
every replay writes to it anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.models.interface import LayerAttention
from saccade.ops.row_words import TapWords


class Tapped(NamedTuple):
    """Of rows that follow each other in one layer: ``q``, ``out`` [rows, heads, head_dim] of the same dtype, ``lse``
    fp32 [rows, heads] over what was read."""

    first: int
    q: Tensor
    out: Tensor
    lse: Tensor


@dataclass(eq=False)
class Tap:
    """One step's, or one recording's. ``specs``: by layer, what it asks for."""

    specs: dict[int, LayerAttention] = field(default_factory=dict)
    _layers: dict[int, list[Tapped]] = field(default_factory=dict)
    _addresses: Tensor | None = None

    def take(self, layer: int, rows: slice, q: Tensor, out: Tensor, lse: Tensor, spec: LayerAttention) -> None:
        """Of ``rows``, as of :class:`Tapped`."""
        q, out = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, out.to(q.dtype)))
        self._layers.setdefault(layer, []).append(Tapped(rows.start, q, out, lse.float()))
        self.specs[layer] = spec

    @property
    def dtype(self) -> torch.dtype:
        """Of queries and results."""
        return next(iter(self._layers.values()))[0].q.dtype

    @property
    def heads(self) -> int:
        """Query heads."""
        return next(iter(self._layers.values()))[0].q.shape[1]

    def row(self, layer: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """``q``, ``out`` [heads, head_dim] and ``lse`` [heads]."""
        own = max((one for one in self._layers[layer] if one.first <= row), key=lambda one: one.first)
        return own.q[row - own.first], own.out[row - own.first], own.lse[row - own.first]

    def addresses(self) -> Tensor:
        """int64 [layers, rows, 6]: the TapWords of each row. On the tensors' device."""
        if self._addresses is None:
            layers = [sorted(self._layers[layer], key=lambda one: one.first) for layer in sorted(self._layers)]
            listed = [[line for one in layer for line in _lines(one)] for layer in layers]
            made = torch.tensor(listed, dtype=torch.int64, device="cpu")
            device = layers[0][0].q.device
            self._addresses = made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
        return self._addresses


def _lines(one: Tapped) -> list[TapWords]:
    """The entries of its rows."""
    q, out, lse = one.q, one.out, one.lse
    return [
        TapWords(q[row].data_ptr(), q.stride(1), out[row].data_ptr(), out.stride(1), lse[row].data_ptr(), lse.stride(1))
        for row in range(len(q))
    ]
