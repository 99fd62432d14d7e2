"""The decoder of the Llama shape: layers as ``project``, attention, ``finish``, and ``logits`` at the end, over the
kernels that suit the rows. transformers' modules, which it equals, run all other shapes (``models.modules``).

Without it a step of few rows spends more time between the modules' calls than in reading weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from saccade.models.families import Family
from saccade.models.interface import LayerAttention, ModelSpec, Stopwatch
from saccade.models.llama_fp8 import Fp8Kernels, quantize_layers
from saccade.models.llama_kernels import (
    KernelSet,
    LayerKernels,
    ProductHead,
    ProductLayer,
    Products,
    Projected,
    RowPasses,
    TorchProducts,
)
from saccade.models.llama_weights import LlamaWeights, read_weights
from saccade.ops import row_passes, triton
from saccade.ops.layer_rows import MOST_ROWS, RowLayer, RowLayers, head, serves

MLP_ROWS = 1024  # whose gate and up values stay in a CPU's caches until they have been multiplied


class LlamaDecoder:
    """The layers and the head of a checked model. ``attention[i]`` is what layer i asks of its attention.

    ``passes`` run between matrix products, for any number of rows; by default what suits the weights' device does, and
    few rows on a CPU have kernels of their own. ``layers``: those of other products, which then run all rows.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        spec: ModelSpec,
        passes: RowPasses | None = None,
        layers: Sequence[LayerKernels] | None = None,
    ) -> None:
        self.attention = [
            LayerAttention(scale=scale, window=window) for scale, window in zip(weights.scales, spec.windows)
        ]
        self.weights = weights
        self._layers = layers
        self._many = self._products(passes or _passes(weights.head.weight), joined=False)
        self._few = _row_kernels(weights, self.attention) if passes is None and layers is None else None
        self._most = MOST_ROWS.get(weights.head.weight.dtype, 0)  # rows that these serve
        self._kernels = self._few, self._many

    @classmethod
    def of(
        cls, model: Any, family: Family, spec: ModelSpec, join: bool | None = None, quantize: str | None = None
    ) -> LlamaDecoder | None:
        """None where the model's modules are not of the shape. ``join`` (by default on a GPU) lays the weights of a
        layer's query, key and value side by side; the modules then hold parts of them. ``quantize``: one of
        ``ops.fp8.QUANTIZATIONS``, by which all layers' products run; ModelError where it cannot."""
        weights = read_weights(model, family, spec.head_dim, join if quantize is None else False)
        if weights is None or quantize is None:
            return None if weights is None else cls(weights, spec)
        kernels = Fp8Kernels.of(quantize, weights.head.weight.device, spec.dtype)
        return cls(weights, spec, layers=quantize_layers(model.get_decoder().layers, weights.layers, kernels))

    def kernels(self, rows: int) -> KernelSet:
        """What runs the layers for a pass of ``rows`` rows."""
        few, many = self._kernels
        return few if few is not None and 0 < rows <= self._most else many

    @property
    def has_row_kernels(self) -> bool:
        """Whether few rows run in C++ kernels, whose threads are those of attention's."""
        return self._few is not None

    def step_kernels(self) -> KernelSet:
        """What runs a decode step on a GPU: products and Triton launches, which a graph can record."""
        from saccade.ops.triton import products, rows  # needs Triton

        return self._products(rows, joined=True, products=products)

    def watch(self, stopwatch: Stopwatch | None) -> None:
        """Have ``stopwatch`` time the operations as "linear". None ends it."""
        sets = self._few, self._many
        self._kernels = (
            sets
            if stopwatch is None
            else (None if self._few is None else self._few.timed(stopwatch), self._many.timed(stopwatch))
        )

    def project(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        """Queries, keys and values [heads or kv_heads, rows, head_dim] of ``hidden`` [rows, channels], post-RoPE by
        ``cos``, ``sin`` [rows, head_dim]."""
        return self.kernels(hidden.shape[0]).layers[layer].project(hidden, cos, sin)

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> None:
        """Add to ``hidden`` [rows, channels], in place, what attention's output ``attended`` [heads, rows, head_dim]
        and the MLP make of it."""
        delta = self.kernels(hidden.shape[0]).layers[layer].finish(hidden, attended)
        if delta is not None:
            hidden.add_(delta)

    def _products(self, passes: RowPasses, joined: bool, products: Products | None = None) -> KernelSet:
        weights, products = self.weights, products or TorchProducts(passes)
        head = ProductHead(weights.norm, weights.head, passes, products)
        if self._layers is not None:
            return KernelSet(self._layers, head)
        most = MLP_ROWS if weights.head.weight.device.type == "cpu" else 1 << 62
        together = weights.joined if joined and weights.joined is not None else [None] * len(weights.layers)
        layers = [ProductLayer(layer, passes, products, most, one) for layer, one in zip(weights.layers, together)]
        return KernelSet(layers, head)


def _passes(weight: Tensor) -> RowPasses:
    if not weight.is_cuda or not triton.available():
        return row_passes
    from saccade.ops.triton import rows  # needs Triton

    return rows


def _row_kernels(weights: LlamaWeights, attention: Sequence[LayerAttention]) -> KernelSet | None:
    """The C++ kernels for few rows, where they read the weights."""
    if serves(*(part for layer in weights.layers for part in layer.tensors), *weights.ends) is not None:
        return None

    def logits(hidden: Tensor, delta: Tensor | None) -> Tensor:
        return head(hidden if delta is None else hidden.add_(delta), weights.norm, weights.head)

    layers = [RowLayer(layer) for layer in weights.layers]
    return KernelSet(layers, logits, RowLayers(layers, [(one.scale, one.softcap) for one in attention]))
