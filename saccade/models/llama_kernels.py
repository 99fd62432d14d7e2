"""What runs the operations of ``models.llama``: the protocol, matrix products with row passes between them, and a
stopwatch around either. The C++ kernels for few rows are ``ops.layer_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from saccade.models.interface import Stopwatch
from saccade.ops.layer_rows import RowLayers
from saccade.ops.layer_weights import LayerWeights, Norm
from saccade.ops.matrices import Matrix, RowPasses

Projected = tuple[Tensor, Tensor, Tensor]


class LayerKernels(Protocol):
    """One layer around its attention. ``hidden`` [rows, channels] is contiguous and written to; a ``delta`` of the same
    shape is what is still to be added to it, so that the next norm can add it in the same pass."""

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, delta: Tensor | None = None) -> Projected:
        """Queries, keys and values [heads or kv_heads, rows, head_dim], post-RoPE by ``cos``, ``sin`` [rows, head_dim],
        after ``delta`` has been added to ``hidden``."""
        ...

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor | None:
        """What follows attention, whose output is ``attended`` [heads, rows, head_dim]. Returns the ``delta`` that is
        left to add to ``hidden``, if there is one."""
        ...


class Products(Protocol):
    """Products of rows with matrices: their own (:class:`OwnProducts`), or ``ops.triton.products`` for few rows on a
    GPU."""

    def product(self, x: Any, matrix: Matrix) -> Tensor: ...

    def gated(self, x: Any, gate: Matrix, up: Matrix) -> Any: ...


@dataclass(frozen=True)
class OwnProducts:
    """The matrices' own products, any number of rows on any device, with ``passes`` between them."""

    passes: RowPasses

    def product(self, x: Any, matrix: Matrix) -> Tensor:
        """``x`` [rows, channels] times ``matrix``."""
        return matrix.product(x)

    def gated(self, x: Any, gate: Matrix, up: Matrix) -> Any:
        """``silu(x times gate) * (x times up)``."""
        return self.passes.gated(gate.product(x), up.product(x))


@dataclass(frozen=True, eq=False)
class KernelSet:
    """All layers, and ``logits(hidden, delta)`` -> [rows, vocab_size] in the dtype of ``hidden``, or as float32 of such
    values. ``whole``: all layers, attention included, in one call, where the backend has one; it then
    times them, too."""

    layers: Sequence[LayerKernels]
    logits: Callable[[Tensor, Tensor | None], Tensor]
    whole: RowLayers | None = None

    def timed(self, stopwatch: Stopwatch) -> KernelSet:
        """The same kernels, timed as "linear"."""

        def logits(hidden: Tensor, delta: Tensor | None) -> Tensor:
            stopwatch.begin("linear")
            out = self.logits(hidden, delta)
            stopwatch.end()
            return out

        return KernelSet([_TimedLayer(layer, stopwatch) for layer in self.layers], logits, self.whole)


class ProductLayer:
    """A layer by matrix ``products``, with ``passes`` between them that leave rows as its matrices take them. At most
    ``mlp_rows`` rows go through the MLP at a time."""

    def __init__(self, weights: LayerWeights, passes: RowPasses, products: Products, mlp_rows: int) -> None:
        self._weights = weights
        self._products = products
        self._passes = weights.output.passes(passes)
        self._mlp_rows = mlp_rows if self._passes is passes else 1 << 62
        self._heads = [part.outputs // weights.head_dim for part in weights.matrices[:3]]

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, delta: Tensor | None = None) -> Projected:
        """See :class:`LayerKernels`."""
        weights, product = self._weights, self._products.product
        shape = hidden.shape[0], -1, weights.head_dim
        x = self._passes.add_norm(hidden, delta, weights.norm.weight, weights.norm.epsilon)
        if weights.joined is None:
            q, k, v = (product(x, part).view(shape) for part in weights.matrices[:3])
        else:
            q, k, v = product(x, weights.joined).view(shape).split(self._heads, 1)
        if weights.rotated:
            self._passes.rotate(q, k, cos, sin, weights.head_norms)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor | None:
        """See :class:`LayerKernels`."""
        weights = self._weights
        delta = self._products.product(self._passes.heads(attended), weights.output)
        x = self._passes.add_norm(hidden, delta, weights.second_norm.weight, weights.second_norm.epsilon)
        if hidden.shape[0] <= self._mlp_rows:
            return self._mlp(x)
        for part in x.split(self._mlp_rows):
            part.copy_(self._mlp(part))
        return x

    def _mlp(self, x: Any) -> Tensor:
        weights, products = self._weights, self._products
        if weights.both is None:
            inner = products.gated(x, weights.gate, weights.up)
        else:
            inner = self._passes.gated(*products.product(x, weights.both).chunk(2, -1))
        return products.product(inner, weights.down)


class ProductHead:
    """The final norm and the head as a matrix product."""

    def __init__(self, norm: Norm, matrix: Matrix, passes: RowPasses, products: Products) -> None:
        self._norm = norm
        self._matrix = matrix
        self._passes = passes
        self._products = products

    def __call__(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        x = self._passes.add_norm(hidden, delta, self._norm.weight, self._norm.epsilon)
        return self._products.product(x, self._matrix)


class _TimedLayer:
    def __init__(self, layer: LayerKernels, stopwatch: Stopwatch) -> None:
        self._layer = layer
        self._stopwatch = stopwatch

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, delta: Tensor | None = None) -> Projected:
        self._stopwatch.begin("linear")
        parts = self._layer.project(hidden, cos, sin, delta)
        self._stopwatch.end()
        return parts

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor | None:
        self._stopwatch.begin("linear")
        delta = self._layer.finish(hidden, attended)
        self._stopwatch.end()
        return delta
