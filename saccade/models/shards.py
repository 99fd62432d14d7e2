"""A model of Llama's shape shared out between ranks by its KV heads (Megatron-LM; Shoeybi et al., 2019, section 3).

A rank has the query heads that read its KV heads, the rows of the query, key and value matrices that make them, and the
columns of the output matrix that take them in; of the MLP, where its width divides evenly, a part of the inner
channels. Of more ranks than KV heads several have the same head, with all query heads that read it: they attend alike,
and divide what the output matrix takes in. What the output matrices of all ranks make is added up. A matrix in groups
of channels (GGUF, GPTQ, AWQ) is not cut across them: of an output matrix of that kind a rank has rows, which multiply
the channels of all ranks.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.errors import ModelError
from saccade.models.interface import ModelSpec
from saccade.models.llama import LlamaDecoder
from saccade.models.loader import LoadedModel
from saccade.models.runner import HFRunner
from saccade.ops import row_passes
from saccade.ops.layer_weights import LayerWeights
from saccade.ops.matrices import DenseMatrix, Matrix, PartMatrix
from saccade.selection.head_part import HeadPart

logger = logging.getLogger(__name__)


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
    fitting = fitting_ranks(spec.heads, spec.kv_heads, spec.head_dim)
    if ranks not in fitting:
        raise ModelError(
            f"tensor_parallel_size={ranks} cannot share out the model's {spec.kv_heads} KV heads evenly; "
            f"use {' or '.join(map(str, fitting))}"
        )
    parts = min(ranks, spec.kv_heads)
    return replace(spec, heads=spec.heads // parts, kv_heads=spec.kv_heads // parts)


def fitting_ranks(heads: int, kv_heads: int, head_dim: int) -> list[int]:
    """Numbers of ranks of which each gets as many KV heads, or of which each KV head gets as many: these divide the
    output matrix's channels evenly."""
    fewer = [ranks for ranks in range(1, kv_heads + 1) if kv_heads % ranks == 0]
    more = range(2 * kv_heads, heads + 1, kv_heads)
    return [*fewer, *(ranks for ranks in more if heads * head_dim % ranks == 0)]


def release(device: torch.device) -> None:
    """Have the memory of parts that other ranks have, and that are held here no more, given back."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


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
    if part.copies > 1 and rank == 0:
        logger.warning(
            "%d KV heads for tensor_parallel_size=%d: each is stored by %d processes, which attend for all query heads "
            "that read it",
            *(model.spec.kv_heads, ranks, part.copies),
        )
    layers = [_part(layer, part, rank, ranks, joined) for layer in whole.weights.layers]
    head = _head(whole.weights.head, rank, ranks, joined)
    llama = LlamaDecoder(replace(whole.weights, layers=layers, head=head))
    runner = HFRunner(model.runner.model, model.runner.family, spec, llama)
    return replace(model, spec=spec, runner=runner, part=part)


Share = tuple[int, int]  # which of how many equal ones of the channels that a part is given are its own


class SummedMatrix(PartMatrix):
    """A rank's part of a matrix along its channels: what the parts of all ranks make is added up."""

    def __init__(self, part: Matrix, joined: Joined, share: Share = (0, 1)) -> None:
        super().__init__(part)
        self._joined, self._share = joined, share

    def through(self, product: Callable[[Any, Matrix], Tensor], x: Any) -> Tensor:
        """See :class:`PartMatrix`."""
        return self._joined().sum(product(_own_channels(x, self._share), self.part))

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> SummedMatrix:
        """See :class:`Matrix`."""
        return SummedMatrix(self.part.like(stored, bias), self._joined, self._share)


class GatheredMatrix(PartMatrix):
    """A rank's outputs of a matrix whose channels the ranks make together: they are gathered before the product, as its
    outputs are behind it, so that a product is that of the whole matrix, bit for bit. ``share``: as of
    :class:`SummedMatrix`."""

    def __init__(self, part: Matrix, joined: Joined, share: Share = (0, 1)) -> None:
        super().__init__(part)
        self._joined, self._share = joined, share

    def through(self, product: Callable[[Any, Matrix], Tensor], x: Any) -> Tensor:
        """See :class:`PartMatrix`: ``x`` has this rank's channels, the product the outputs of all ranks."""
        ranks = self._joined()
        return torch.cat(ranks.gather(product(torch.cat(ranks.gather(x), 1), self.part)), 1)

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> GatheredMatrix:
        """See :class:`Matrix`."""
        return GatheredMatrix(self.part.like(stored, bias), self._joined, self._share)


class VocabularyMatrix(PartMatrix):
    """A rank's part of a head by its tokens, the last one's filled up to as many: all ranks' logits are gathered, so
    that all have the same ones. ``tokens``: of all parts."""

    def __init__(self, part: Matrix, tokens: int, joined: Joined) -> None:
        super().__init__(part)
        self._tokens, self._joined = tokens, joined

    def through(self, product: Callable[[Any, Matrix], Tensor], x: Any) -> Tensor:
        """See :class:`PartMatrix`."""
        return torch.cat(self._joined().gather(product(x, self.part)), 1)[:, : self._tokens]

    def like(self, stored: Sequence[Tensor], bias: Tensor | None) -> VocabularyMatrix:
        """See :class:`Matrix`."""
        return VocabularyMatrix(self.part.like(stored, bias), self._tokens, self._joined)


def _head(head: Matrix, rank: int, ranks: int, joined: Joined) -> Matrix:
    """What a rank has of the head: all of one that is of no plain numbers."""
    if type(head) is not DenseMatrix:
        return head
    tokens, each = head.outputs, -(-head.outputs // ranks)
    rows = slice(rank * each, (rank + 1) * each)
    own, bias = head.weight[rows], None if head.bias is None else head.bias[rows]
    short = each - len(own)
    if short:
        own, bias = pad(own, (0, 0, 0, short)), None if bias is None else pad(bias, (0, short))
    return VocabularyMatrix(_own(DenseMatrix(own, bias)), tokens, joined)


def _own(matrix: Matrix) -> Matrix:
    """The matrix in memory of its own on a GPU, so that the whole of which it is a part can go."""
    if not matrix.weight.is_cuda:
        return matrix
    return matrix.like([one.clone() for one in matrix.stored], None if matrix.bias is None else matrix.bias.clone())


def _own_channels(x: Tensor, share: Share) -> Tensor:
    number, parts = share
    return x if parts == 1 else x.chunk(parts, 1)[number]


def _part(layer: LayerWeights, part: HeadPart, rank: int, ranks: int, joined: Joined) -> LayerWeights:
    """What a rank has of a layer."""
    copy = rank % part.copies, part.copies

    def heads(matrix: Matrix) -> Matrix:
        return _own(matrix.split([matrix.outputs // part.parts] * part.parts)[part.number])

    def outputs(matrix: Matrix) -> Matrix:
        return _own(matrix.split([matrix.outputs // ranks] * ranks)[rank])

    def together(own: Callable[[Matrix], Matrix], whole: Matrix | None, names: tuple[str, ...]) -> dict[str, Matrix]:
        """A rank's ``own`` parts of matrices of which kernels read those of one name as one; ``whole``: as one, if they
        do."""
        parts = [own(getattr(layer, name)) for name in names[1:]]
        if whole is None:
            return dict(zip(names[1:], parts))
        one = parts[0].join(parts)
        return {names[0]: one, **dict(zip(names[1:], one.split([part.outputs for part in parts])))}

    def channels(matrix: Matrix, share: Share) -> Matrix:
        if matrix.passes(row_passes) is not row_passes:
            raise ModelError(
                f"tensor_parallel_size={ranks} is not for weights in {matrix.format}, whose products take 8-bit rows; "
                "use other weights, or tensor_parallel_size=1"
            )
        if not isinstance(matrix, DenseMatrix):
            return GatheredMatrix(outputs(matrix), joined, share)
        own = matrix.weight.chunk(ranks, 1)[rank].contiguous()
        return SummedMatrix(DenseMatrix(own, matrix.bias if rank == 0 else None), joined, share)

    projected: dict[str, Any] = together(heads, layer.joined, ("joined", "query", "key", "value"))
    made = replace(layer, output=channels(layer.output, copy), **projected)
    if layer.gate.outputs % ranks:
        return made
    inner: dict[str, Any] = together(outputs, layer.both, ("both", "gate", "up"))
    return replace(made, down=channels(layer.down, (0, 1)), **inner)
