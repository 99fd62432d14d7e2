"""The weights of a decoder layer of the Llama shape, as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Matrix:
    """A product with ``weight`` [out, in] plus ``bias`` [out]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm (Zhang and Sennrich, 2019): ``weight`` [channels] times what it norms."""

    weight: Tensor
    epsilon: float


class HeadNorms(NamedTuple):
    """RMS norms of every query and key head before it is rotated; the weights are [head_dim]."""

    query: Tensor
    key: Tensor
    epsilon: float


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. ``norm`` and ``second_norm`` stand before attention and before the gated MLP."""

    norm: Norm
    query: Matrix  # [heads * head_dim, channels]
    key: Matrix  # [kv_heads * head_dim, channels]
    value: Matrix  # [kv_heads * head_dim, channels]
    output: Matrix  # [channels, heads * head_dim]
    second_norm: Norm
    gate: Matrix  # [inner, channels]
    up: Matrix  # [inner, channels]
    down: Matrix  # [channels, inner]
    head_dim: int
    rotated: bool = True  # whether queries and keys are
    head_norms: HeadNorms | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Query, key, value, output, gate, up, down."""
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Every weight and bias."""
        norms = self.norm.weight, self.second_norm.weight, *(self.head_norms or ())[:2]
        return *norms, *(part for matrix in self.matrices for part in (matrix.weight, matrix.bias))
