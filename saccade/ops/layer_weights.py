"""The weights of a decoder layer of the Llama shape, as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from saccade.ops.matrices import Matrix


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
    """One layer. ``norm`` and ``second_norm`` stand before attention and before the gated MLP. ``joined`` and ``both``,
    if there are any, are query, key and value, and gate and up, as one matrix, of which theirs are parts."""

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
    joined: Matrix | None = None
    both: Matrix | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Query, key, value, output, gate, up, down."""
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down

    @property
    def norms(self) -> tuple[Tensor, ...]:
        """The weights of all norms."""
        return self.norm.weight, self.second_norm.weight, *(self.head_norms or ())[:2]
