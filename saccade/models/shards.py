"""A model of Llama's shape shared out between ranks by its KV heads (Megatron-LM; Shoeybi et al., 2019, section 3).

A rank has the query heads that read its KV heads, the rows of the query, key and value matrices that make them, and the
columns of the output matrix that take them in; of the MLP, where its width divides evenly, a part of the inner
channels. Of more ranks than KV heads several have the same head, with all query heads that read it: they attend alike,
and divide what the output matrix takes in. What the output matrices of all ranks make is added up. A matrix in groups
of channels (GGUF, GPTQ, AWQ) is not cut across them: of an output matrix of that kind a rank has rows, which multiply
the channels of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from saccade.errors import ModelError
from saccade.models.interface import ModelSpec
from saccade.models.llama import LlamaDecoder
from saccade.models.loader import LoadedModel
from saccade.models.runner import HFRunner
from saccade.ops import row_passes
from saccade.ops.layer_weights import LayerWeights
from saccade.ops.matrices import DenseMatrix, Matrix
from saccade.selection.head_part import HeadPart


class Ranks(Protocol):
    """What joins the ranks of a model; each calls the same, for tensors of one shape and dtype, in the same order."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in the dtype of ``part``."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """All ranks' parts, in the order of ranks."""


Joined = Callable[[], Ranks]  # asked for at each product: parts are made before ranks have met


def shard(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The shape of one rank's part. ModelError where the KV heads cannot be shared out evenly, or have no such number
    of ranks each."""
    fitting = [count for count in range(1, spec.heads + 1) if _fits(spec, count)]
    if ranks not in fitting:
        raise ModelError(
            f"tensor_parallel_size={ranks} cannot share out the model's {spec.kv_heads} KV heads evenly; "
            f"use {' or '.join(map(str, fitting))}"
        )
    parts = min(ranks, spec.kv_heads)
    return replace(spec, heads=spec.heads // parts, kv_heads=spec.kv_heads // parts)


def _fits(spec: ModelSpec, ranks: int) -> bool:
    """Whether each rank gets as many KV heads, or each KV head as many ranks, which divide the output matrix's
    channels evenly."""
    if ranks <= spec.kv_heads:
        return spec.kv_heads % ranks == 0
    return ranks % spec.kv_heads == 0 and spec.heads * spec.head_dim % ranks == 0


def shard_model(model: LoadedModel, rank: int, ranks: int, joined: Joined) -> LoadedModel:
    """The part of ``rank``, from 0, of a model that ``ranks`` ranks run together. ModelError for a model of another
    shape than Llama's, or whose KV heads do not share out."""
    spec, whole = shard(model.spec, ranks), model.runner.llama
    part = HeadPart.of(model.spec.kv_heads, rank, ranks)
    if whole is None:
        raise ModelError(
            f"tensor_parallel_size={ranks} is for models whose layers are Llama's (docs/models.md), not "
            f"{spec.family}; use tensor_parallel_size=1"
        )
    layers = [_part(layer, part, rank, ranks, joined) for layer in whole.weights.layers]
    llama = LlamaDecoder(replace(whole.weights, layers=layers))
    runner = HFRunner(model.runner.model, model.runner.family, spec, llama)
    return replace(model, spec=spec, runner=runner, part=part)


class SummedMatrix(DenseMatrix):
    """A rank's part of a matrix along its channels: what the parts of all ranks make is added up. ``share``: which of
    how many equal ones of the channels that it is given are its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None, joined: Joined, share: Share) -> None:
        super().__init__(weight, bias)
        self._joined, self._share = joined, share

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`."""
        return self._joined().sum(super().product(_own_channels(x, self._share)))

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> SummedMatrix:
        """See :class:`Matrix`."""
        return SummedMatrix(stored[0], bias, self._joined, self._share)

    def native(self, dtype: torch.dtype) -> None:
        """None: the C++ kernels add nothing up over ranks."""


class GatheredMatrix(Matrix):
    """A rank's outputs of a matrix whose channels the ranks make together: they are gathered before the product, as its
    outputs are behind it, so that a product is that of the whole matrix, bit for bit. ``share``: as of
    :class:`SummedMatrix`."""

    def __init__(self, part: Matrix, joined: Joined, share: Share) -> None:
        self._part, self._joined, self._share = part, joined, share
        self.format, self.weight, self.bias, self.channels = part.format, part.weight, part.bias, part.channels

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See :class:`Matrix`."""
        return self._part.stored

    @property
    def outputs(self) -> int:
        """Those of this rank's part."""
        return self._part.outputs

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> GatheredMatrix:
        """See :class:`Matrix`."""
        return GatheredMatrix(self._part.like(stored, bias), self._joined, self._share)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`Matrix`."""
        return self._part.rows(ids, dtype)

    def product(self, x: Tensor) -> Tensor:
        """See :class:`Matrix`: ``x`` has this rank's channels, the product the outputs of all ranks."""
        ranks = self._joined()
        whole = torch.cat(ranks.gather(_own_channels(x, self._share)), 1)
        return torch.cat(ranks.gather(self._part.product(whole)), 1)


Share = tuple[int, int]


def _own_channels(x: Tensor, share: Share) -> Tensor:
    number, parts = share
    return x if parts == 1 else x.chunk(parts, 1)[number]


def _part(layer: LayerWeights, part: HeadPart, rank: int, ranks: int, joined: Joined) -> LayerWeights:
    """What a rank has of a layer."""
    copy = rank % part.copies, part.copies

    def heads(matrix: Matrix) -> Matrix:
        return matrix.split([matrix.outputs // part.parts] * part.parts)[part.number]

    def outputs(matrix: Matrix) -> Matrix:
        return matrix.split([matrix.outputs // ranks] * ranks)[rank]

    def channels(matrix: Matrix, share: Share) -> Matrix:
        if matrix.passes(row_passes) is not row_passes:
            raise ModelError(
                f"tensor_parallel_size={ranks} is not for weights in {matrix.format}, whose products take 8-bit rows; "
                "use other weights, or tensor_parallel_size=1"
            )
        if not isinstance(matrix, DenseMatrix):
            return GatheredMatrix(outputs(matrix), joined, share)
        own = matrix.weight.chunk(ranks, 1)[rank].contiguous()
        return SummedMatrix(own, matrix.bias if rank == 0 else None, joined, share)

    made = replace(
        layer,
        query=heads(layer.query),
        key=heads(layer.key),
        value=heads(layer.value),
        output=channels(layer.output, copy),
    )
    if layer.gate.outputs % ranks:
        return made
    return replace(made, gate=outputs(layer.gate), up=outputs(layer.up), down=channels(layer.down, (0, 1)))
