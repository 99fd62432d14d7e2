"""What runs the operations of ``models.llama``: the protocol, matrix products with row passes between them, and a
stopwatch around either. The C++ kernels for few rows are ``ops.layer_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from saccade.models.interface import Stopwatch
from saccade.ops.layer_rows import RowLayers
from saccade.ops.layer_weights import HeadNorms, LayerWeights, Matrix, Norm

Projected = tuple[Tensor, Tensor, Tensor]


def product(x: Tensor, matrix: Matrix) -> Tensor:
    """``x`` [rows, in] times a matrix: [rows, out].

    For every number of rows it meets, torch keeps code and packed weights of a bfloat16 product on a CPU, some 4 MB a
    prompt length, for good. So rows are padded to one of eight numbers an octave, which costs 6 % on average.
    """
    rows = x.shape[0]
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return linear(x, matrix.weight, matrix.bias)
    return linear(pad(x, (0, 0, 0, padded_rows(rows) - rows)), matrix.weight, matrix.bias)[:rows]


def padded_rows(rows: int) -> int:
    """``rows`` rounded up to four significant bits."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


class LayerKernels(Protocol):
    """One layer around its attention. ``hidden`` [rows, channels] is contiguous and written to; a ``delta`` of the same
    shape is what is still to be added to it, so that whoever norms the sum next can add it in the same pass."""

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, delta: Tensor | None = None) -> Projected:
        """Queries, keys and values [heads or kv_heads, rows, head_dim], post-RoPE by ``cos``, ``sin`` [rows, head_dim],
        after ``delta`` has been added to ``hidden``."""
        ...

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor | None:
        """What follows attention, whose output is ``attended`` [heads, rows, head_dim]. Returns the ``delta`` that is
        left to add to ``hidden``, if there is one."""
        ...


class RowPasses(Protocol):
    """What happens to rows between matrix products: ``ops.row_passes``, or ``ops.triton.rows`` on a GPU, where each is
    one launch that a graph can record."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor: ...

    def rotate(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> None: ...

    def gated(self, gate: Tensor, up: Tensor) -> Tensor: ...


class Products(Protocol):
    """Products of rows with matrices: torch's (:class:`TorchProducts`), or ``ops.triton.products`` for few rows on a
    GPU."""

    def product(self, x: Tensor, matrix: Matrix) -> Tensor: ...

    def gated(self, x: Tensor, gate: Matrix, up: Matrix) -> Tensor: ...


@dataclass(frozen=True)
class TorchProducts:
    """torch's products, any number of rows on any device, with ``passes`` between them."""

    passes: RowPasses

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        """See :func:`product`."""
        return product(x, matrix)

    def gated(self, x: Tensor, gate: Matrix, up: Matrix) -> Tensor:
        """``silu(x times gate) * (x times up)``."""
        return self.passes.gated(product(x, gate), product(x, up))


@dataclass(frozen=True, eq=False)
class KernelSet:
    """All layers, and ``logits(hidden, delta)`` -> [rows, vocab_size] in the dtype of ``hidden``, or as float32 of such
    values. ``whole``: the layers as whoever attends can run them by himself, in one call, if there is such a thing; he
    then times them, too."""

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
    """A layer by matrix ``products``, with ``passes`` between them.

    ``joined``, if there is one, is query, key and value as one matrix, of which theirs are parts: one product then
    reads them. At most ``mlp_rows`` rows go through the MLP at a time.
    """

    def __init__(
        self,
        weights: LayerWeights,
        passes: RowPasses,
        products: Products,
        mlp_rows: int,
        joined: Matrix | None = None,
    ) -> None:
        self._weights = weights
        self._products = products
        self._joined = joined
        self._passes = passes
        self._mlp_rows = mlp_rows
        self._heads = [part.weight.shape[0] // weights.head_dim for part in weights.matrices[:3]]

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, delta: Tensor | None = None) -> Projected:
        """See :class:`LayerKernels`."""
        weights = self._weights
        shape = hidden.shape[0], -1, weights.head_dim
        x = self._passes.add_norm(hidden, delta, weights.norm.weight, weights.norm.epsilon)
        if self._joined is None:
            q = self._products.product(x, weights.query).view(shape)
            k = self._products.product(x, weights.key).view(shape)
            v = self._products.product(x, weights.value).view(shape)
        else:
            q, k, v = self._products.product(x, self._joined).view(shape).split(self._heads, 1)
        if weights.rotated:
            self._passes.rotate(q, k, cos, sin, weights.head_norms)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor | None:
        """See :class:`LayerKernels`."""
        weights = self._weights
        attended = attended.transpose(0, 1).reshape(hidden.shape[0], -1)
        delta = self._products.product(attended, weights.output)
        x = self._passes.add_norm(hidden, delta, weights.second_norm.weight, weights.second_norm.epsilon)
        if len(x) <= self._mlp_rows:
            return self._mlp(x)
        for part in x.split(self._mlp_rows):
            part.copy_(self._mlp(part))
        return x

    def _mlp(self, x: Tensor) -> Tensor:
        inner = self._products.gated(x, self._weights.gate, self._weights.up)
        return self._products.product(inner, self._weights.down)


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
