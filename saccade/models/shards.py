"""A model of Llama's shape shared out between ranks by its KV heads (Megatron-LM; Shoeybi et al., 2019, section 3).

A rank has the query heads that read its KV heads, the rows of the query, key and value matrices that make them, and the
columns of the output matrix that take them in; of the MLP, where its width divides evenly, a part of the inner
channels. What the output matrices of all ranks make is added up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from saccade.errors import ModelError
from saccade.models.interface import ModelSpec
from saccade.models.llama import MLP_ROWS, LlamaDecoder
from saccade.models.llama_kernels import ProductLayer, TorchProducts
from saccade.models.loader import LoadedModel
from saccade.models.runner import HFRunner
from saccade.ops import row_passes
from saccade.ops.layer_weights import LayerWeights, Matrix

Sum = Callable[[Tensor], Tensor]


def shard(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The shape of one rank's part. ModelError where the KV heads cannot be shared out evenly."""
    if spec.kv_heads % ranks or spec.heads % ranks:
        fitting = [str(count) for count in range(1, spec.kv_heads + 1) if spec.kv_heads % count == 0]
        raise ModelError(
            f"tensor_parallel_size={ranks} cannot share out the model's {spec.kv_heads} KV heads evenly; "
            f"use {' or '.join(fitting)}"
        )
    return replace(spec, heads=spec.heads // ranks, kv_heads=spec.kv_heads // ranks)


def shard_model(model: LoadedModel, rank: int, ranks: int, add: Sum) -> LoadedModel:
    """The part of ``rank``, from 0. ``add`` returns the sum of all ranks' tensors; each calls it for the same ones, in
    the same order. ModelError for a model of another shape than Llama's, or whose KV heads do not share out."""
    spec, whole = shard(model.spec, ranks), model.runner.llama
    if whole is None:
        raise ModelError(
            f"tensor_parallel_size={ranks} is for models whose layers are Llama's (docs/models.md), not "
            f"{spec.family}; use tensor_parallel_size=1"
        )
    layers = [_part(layer, rank, ranks) for layer in whole.weights.layers]
    summed = {layer.output for layer in layers}
    summed |= {part.down for part, one in zip(layers, whole.weights.layers) if part.down is not one.down}
    products = SummedProducts(summed, add)
    kernels = [ProductLayer(layer, row_passes, products, MLP_ROWS) for layer in layers]
    llama = LlamaDecoder(whole.weights, spec, layers=kernels)
    return replace(model, spec=spec, runner=HFRunner(model.runner.model, model.runner.family, spec, llama))


class SummedProducts:
    """torch's products, of which those with the matrices ``summed`` are added up over all ranks."""

    def __init__(self, summed: set[Matrix], add: Sum) -> None:
        self._own, self._summed, self._add = TorchProducts(row_passes), summed, add

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        """See ``llama_kernels.product``."""
        made = self._own.product(x, matrix)
        return self._add(made) if matrix in self._summed else made

    def gated(self, x: Tensor, gate: Matrix, up: Matrix) -> Tensor:
        """``silu(x times gate) * (x times up)``."""
        return self._own.gated(x, gate, up)


def _part(layer: LayerWeights, rank: int, ranks: int) -> LayerWeights:
    """What a rank has of a layer."""

    def rows(matrix: Matrix) -> Matrix:
        weight, bias = matrix.weight, matrix.bias
        return Matrix(weight.chunk(ranks)[rank], None if bias is None else bias.chunk(ranks)[rank])

    def columns(matrix: Matrix) -> Matrix:
        return Matrix(matrix.weight.chunk(ranks, 1)[rank].contiguous(), matrix.bias if rank == 0 else None)

    part = replace(
        layer, query=rows(layer.query), key=rows(layer.key), value=rows(layer.value), output=columns(layer.output)
    )
    if layer.gate.weight.shape[0] % ranks:
        return part
    return replace(part, gate=rows(layer.gate), up=rows(layer.up), down=columns(layer.down))
