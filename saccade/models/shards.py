"""A model of Llama's shape shared out between ranks by its KV heads (Megatron-LM; Shoeybi et al., 2019, section 3).

A rank has the query heads that read its KV heads, the rows of the query, key and value matrices that make them, and the
columns of the output matrix that take them in; of the MLP, where its width divides evenly, a part of the inner
channels. What the output matrices of all ranks make is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.models.interface import ModelSpec
from saccade.models.llama import LlamaDecoder
from saccade.models.loader import LoadedModel
from saccade.models.runner import HFRunner
from saccade.ops.layer_weights import LayerWeights
from saccade.ops.matrices import DenseMatrix, Matrix

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
    layers = [_part(layer, rank, ranks, add) for layer in whole.weights.layers]
    llama = LlamaDecoder(replace(whole.weights, layers=layers))
    return replace(model, spec=spec, runner=HFRunner(model.runner.model, model.runner.family, spec, llama))


class SummedMatrix(DenseMatrix):
    """A rank's part of a matrix along its channels: what the parts of all ranks make is added up."""

    def __init__(self, weight: Tensor, bias: Tensor | None, add: Sum) -> None:
        super().__init__(weight, bias)
        self._add = add

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`."""
        return self._add(super().product(x))

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> SummedMatrix:
        """See :class:`Matrix`."""
        return SummedMatrix(stored[0], bias, self._add)

    def native(self, dtype: torch.dtype) -> None:
        """None: the C++ kernels add nothing up over ranks."""


def _part(layer: LayerWeights, rank: int, ranks: int, add: Sum) -> LayerWeights:
    """What a rank has of a layer."""

    def outputs(matrix: Matrix) -> Matrix:
        return matrix.split([matrix.outputs // ranks] * ranks)[rank]

    def channels(matrix: Matrix) -> Matrix:
        if not isinstance(matrix, DenseMatrix):
            raise ModelError(
                f"tensor_parallel_size={ranks} is for weights of 16 or 32 bits, not {matrix.format}; "
                "use tensor_parallel_size=1"
            )
        own = matrix.weight.chunk(ranks, 1)[rank].contiguous()
        return SummedMatrix(own, matrix.bias if rank == 0 else None, add)

    part = replace(
        layer,
        query=outputs(layer.query),
        key=outputs(layer.key),
        value=outputs(layer.value),
        output=channels(layer.output),
    )
    if layer.gate.outputs % ranks:
        return part
    return replace(part, gate=outputs(layer.gate), up=outputs(layer.up), down=channels(layer.down))
