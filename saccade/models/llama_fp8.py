"""Layers of the Llama shape whose products run in FP8 (``ops.fp8``). Embedding, norms, rotation, attention and the head
stay in the model's own type: the head decides the token, and reads its weights once for a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from saccade.errors import ModelError
from saccade.models.llama_kernels import LayerKernels, Projected, RowPasses
from saccade.ops import fp8, row_passes
from saccade.ops.fp8 import MULTIPLE, Fp8Matrix, QuantizedRows
from saccade.ops.layer_weights import LayerWeights, Matrix


class Fp8Passes(Protocol):
    """Rows on their way into a product: ``ops.triton.fp8``, or torch's for the reference."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> QuantizedRows: ...

    def gated(self, both: Tensor) -> QuantizedRows: ...

    def heads(self, attended: Tensor) -> QuantizedRows: ...


class Product(Protocol):
    """``ops.fp8.product`` or ``ops.fp8.reference_product``."""

    def __call__(self, x: QuantizedRows, matrix: Fp8Matrix, dtype: torch.dtype) -> Tensor: ...


class ReferencePasses:
    """The passes in torch, each rounded to the activations' type before it is quantized."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> QuantizedRows:
        return fp8.quantize(row_passes.add_norm(hidden, delta, weight, epsilon))

    def gated(self, both: Tensor) -> QuantizedRows:
        gate, up = both.chunk(2, -1)
        return fp8.quantize(torch.nn.functional.silu(gate) * up)

    def heads(self, attended: Tensor) -> QuantizedRows:
        return fp8.quantize(attended.transpose(0, 1).reshape(attended.shape[1], -1))


@dataclass(frozen=True, eq=False)
class Fp8Kernels:
    """What runs FP8 layers: ``passes`` quantize, ``rotate`` turns queries and keys, ``product`` multiplies."""

    passes: Fp8Passes
    rows: RowPasses
    product: Product

    @classmethod
    def of(cls, quantize: str, device: torch.device, dtype: torch.dtype) -> Fp8Kernels:
        """ModelError where ``quantize`` ("fp8" or "fp8_reference") cannot run."""
        if quantize == "fp8_reference":
            return cls(ReferencePasses(), row_passes, fp8.reference_product)
        reason = fp8.why_not(device, dtype)
        if reason is not None:
            raise ModelError(
                f"quantize='fp8' cannot run: {reason}; leave it out, or see what it would answer with "
                "quantize='fp8_reference', which is slow"
            )
        from saccade.ops.triton import fp8 as passes  # needs Triton
        from saccade.ops.triton import rows

        return cls(passes, rows, fp8.product)


class Fp8Layer:
    """A layer by FP8 products, any number of rows. Implements ``LayerKernels``."""

    def __init__(self, weights: LayerWeights, matrices: Sequence[Fp8Matrix], kernels: Fp8Kernels) -> None:
        self._joined, self._output, self._both, self._down = matrices
        self._norm, self._second = weights.norm, weights.second_norm
        self._head_dim, self._rotated, self._head_norms = weights.head_dim, weights.rotated, weights.head_norms
        self._heads = [part.weight.shape[0] // weights.head_dim for part in weights.matrices[:3]]
        self._kernels = kernels

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, delta: Tensor | None = None) -> Projected:
        """See :class:`LayerKernels`."""
        kernels = self._kernels
        x = kernels.passes.add_norm(hidden, delta, self._norm.weight, self._norm.epsilon)
        joined = kernels.product(x, self._joined, hidden.dtype).view(hidden.shape[0], -1, self._head_dim)
        q, k, v = joined.split(self._heads, 1)
        if self._rotated:
            kernels.rows.rotate(q, k, cos, sin, self._head_norms)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor | None:
        """See :class:`LayerKernels`."""
        kernels, dtype = self._kernels, hidden.dtype
        delta = kernels.product(kernels.passes.heads(attended), self._output, dtype)
        x = kernels.passes.add_norm(hidden, delta, self._second.weight, self._second.epsilon)
        inner = kernels.passes.gated(kernels.product(x, self._both, dtype))
        return kernels.product(inner, self._down, dtype)


@torch.no_grad()
def quantize_layers(modules: Sequence[Any], layers: list[LayerWeights], kernels: Fp8Kernels) -> list[LayerKernels]:
    """The FP8 layers of ``modules``, transformers' decoder layers, whose weights are ``layers``.

    The modules' parameters become the e4m3 values, layer by layer, so that one layer at most is held twice; the modules
    do not run any more. ``layers`` ends empty, for it held the weights of before. ModelError for sizes that are no
    multiple of 16.
    """
    made: list[LayerKernels] = []
    for module in modules:
        own = layers.pop(0)
        attention, mlp = module.self_attn, module.mlp
        groups = (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
        query, key, value, output, gate, up, down = own.matrices
        parts = (query, key, value), (output,), (gate, up), (down,)
        matrices = [_joined(ones) for ones in parts]
        for group, matrix in zip(groups, matrices):
            _replace(group, matrix)
        made.append(Fp8Layer(own, matrices, kernels))
    return made


def _joined(parts: Sequence[Matrix]) -> Fp8Matrix:
    """Matrices of the same rows as one, their outputs side by side."""
    wide, channels = sum(part.weight.shape[0] for part in parts), parts[0].weight.shape[1]
    if wide % MULTIPLE or channels % MULTIPLE:
        raise ModelError(
            f"quantize: a product of {channels} by {wide} channels cannot run in FP8, which takes multiples of "
            f"{MULTIPLE}; leave quantize out"
        )
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat(
            [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
        )
    made = [Fp8Matrix.of(part.weight) for part in parts]
    return Fp8Matrix(torch.cat([one.weight for one in made]), torch.cat([one.scale for one in made], 1), bias)


def _replace(modules: Sequence[nn.Linear], matrix: Fp8Matrix) -> None:
    """Let the modules hold parts of the e4m3 weight in the place of their own."""
    widths = [module.weight.shape[0] for module in modules]
    for module, part in zip(modules, matrix.weight.split(widths)):
        module.weight.data = part
