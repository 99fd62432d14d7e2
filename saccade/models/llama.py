"""The decoder of the Llama shape: layers as ``project``, attention, ``finish``, and ``logits`` at the end, over the
kernels that suit the rows. transformers' modules, which it equals, run all other shapes (``models.modules``).

Without it a step of few rows spends more time between the modules' calls than in reading weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.models.interface import LayerAttention, RowsPart, Stopwatch
from saccade.models.key_turns import KeyTurn
from saccade.models.llama_kernels import (
    KernelSet,
    OwnProducts,
    ProductHead,
    ProductLayer,
    Products,
    Projected,
)
from saccade.models.llama_weights import LlamaWeights
from saccade.models.rotary import CosSin
from saccade.ops import row_passes, triton
from saccade.ops.layer_rows import MOST_ROWS, RowLayer, RowLayers, head, serves, serves_head
from saccade.ops.matrices import RowPasses

MLP_ROWS = 1024  # whose gate and up values stay in a CPU's caches until they have been multiplied


class LlamaDecoder:
    """The layers and the head of a checked model. ``attention[i]`` is what layer i asks of its attention.

    ``passes`` run between matrix products, for any number of rows; by default what suits the weights' device does, and
    few rows on a CPU have kernels of their own where these read all matrices.
    """

    def __init__(self, weights: LlamaWeights, passes: RowPasses | None = None) -> None:
        self.attention = [
            LayerAttention(scale=scale, window=window) for scale, window in zip(weights.scales, weights.windows)
        ]
        self.weights = weights
        self.device, self.dtype = weights.norm.weight.device, weights.norm.weight.dtype
        self._many = self._products(passes or _passes(self.device))
        self._few = _row_kernels(weights, self.attention) if passes is None else None
        self._most = MOST_ROWS.get(self.dtype, 0)  # rows that these serve
        self._kernels = self._few, self._many

    def embed(self, token_ids: Tensor) -> Tensor:
        """``token_ids`` [rows] -> what the first layer is given, [rows, channels]."""
        return self.weights.embedding.rows(token_ids, self.dtype)

    def kernels(self, rows: int) -> KernelSet:
        """What runs the layers for a pass of ``rows`` rows."""
        few, many = self._kernels
        return few if few is not None and 0 < rows <= self._most else many

    def turn(self, turns: Sequence[KeyTurn] | None) -> None:
        """Have the layers that a step runs in one call turn their queries and keys, or end it; others leave that to the
        loop."""
        if self._few is not None and self._few.whole is not None:
            self._few.whole.turn(None if turns is None else [(one.query, one.key) for one in turns])

    @property
    def has_row_kernels(self) -> bool:
        """Whether few rows run in C++ kernels, whose threads are those of attention's."""
        return self._few is not None

    def step_kernels(self) -> KernelSet:
        """What runs a decode step on a GPU: products and Triton launches, which a graph can record."""
        from saccade.ops.triton import products, rows  # needs Triton

        return self._products(rows, products)

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

    def run_parts(
        self, hidden: Tensor, rotary: Sequence[CosSin], parts: Sequence[RowsPart], turns: Sequence[KeyTurn] | None
    ) -> None:
        """Take ``hidden`` [rows, channels], which ``parts`` tile, through all layers, in place; layer i has cos and sin
        ``rotary[i]`` [rows, head_dim]. While one part's rows are attended, the next layer of the others is computed."""
        layers = len(self.attention)
        deltas: list[Tensor | None] = [None] * len(parts)
        own = [(part, hidden[part.rows], self.kernels(part.rows.stop - part.rows.start)) for part in parts]

        def begin(number: int, index: int) -> None:
            part, rows, kernels = own[number]
            cos, sin = (one[part.rows] for one in rotary[index])
            q, k, v = kernels.layers[index].project(rows, cos, sin, deltas[number])
            if turns is not None:
                turns[index].turn(q, k)
            part.begin(index, q, k, v, self.attention[index])

        try:
            for number in range(len(own)):
                begin(number, 0)
            for index in range(layers):
                for number, (part, rows, kernels) in enumerate(own):
                    deltas[number] = kernels.layers[index].finish(rows, part.end(index, self.attention[index]))
                    if index + 1 < layers:
                        begin(number, index + 1)
        except BaseException:
            for part in parts:
                part.drop()
            raise
        for (_, rows, _), delta in zip(own, deltas):
            if delta is not None:
                rows.add_(delta)

    def _products(self, passes: RowPasses, products: Products | None = None) -> KernelSet:
        weights = self.weights
        most = MLP_ROWS if self.device.type == "cpu" else 1 << 62
        layers = [
            ProductLayer(layer, passes, products or OwnProducts(layer.output.passes(passes)), most)
            for layer in weights.layers
        ]
        return KernelSet(layers, ProductHead(weights.norm, weights.head, passes, products or OwnProducts(passes)))


def _passes(device: torch.device) -> RowPasses:
    if device.type != "cuda" or not triton.available():
        return row_passes
    from saccade.ops.triton import rows  # needs Triton

    return rows


def _row_kernels(weights: LlamaWeights, attention: Sequence[LayerAttention]) -> KernelSet | None:
    """The C++ kernels for few rows, where they read the weights."""
    if not (all(serves(layer) for layer in weights.layers) and serves_head(weights.norm, weights.head)):
        return None

    def logits(hidden: Tensor, delta: Tensor | None) -> Tensor:
        return head(hidden if delta is None else hidden.add_(delta), weights.norm, weights.head)

    layers = [RowLayer(layer) for layer in weights.layers]
    return KernelSet(layers, logits, RowLayers(layers, [(one.scale, one.softcap) for one in attention]))
