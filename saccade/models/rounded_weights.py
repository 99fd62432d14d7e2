"""Plain weights of another source, rounded to integers as they are loaded (``ops.group_rounding``): matrices of the
layers, and the embedding and the head, which have 8 bits at least, since all tokens go through them."""

from __future__ import annotations

import re
from typing import Protocol

import torch
from torch import Tensor

from saccade.models.llama_weights import Use
from saccade.models.parts import Parts
from saccade.ops import cpu, triton
from saccade.ops.group_rounding import BITS, CHANNELS, rounded_matrix
from saccade.ops.matrices import DenseMatrix, Matrix
from saccade.ops.planes import packed

_ENDS = "model.embed_tokens", "model.embed_tokens_per_layer", "model.embeddings", "lm_head"
_ROUTERS = re.compile(
    r"(^|(?<!\.experts)\.)(router|gate|shared_expert_gate)(\.layer|\.proj)?$"
)  # small, and what they choose is coarse


class PlainSource(Protocol):
    """Tensors of plain numbers: ``models.dense_weights`` of a folder, or of a model that is loaded."""

    @property
    def parts(self) -> Parts | None:
        """What a rank has of the tensors, which are that alone; None for all."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def stored(self, name: str) -> Tensor:
        """The tensor in the type that it is stored in, where it lies."""
        ...

    def tensor(self, name: str, use: Use) -> Tensor:
        """The tensor on the device, and in the dtype, that it runs in."""
        ...

    def read(self, part: Tensor) -> None:
        """Let go of ``part`` of a tensor as :meth:`stored` gave it, which is not read again."""
        ...


class RoundedWeights:
    """The tensors of ``source`` as ``quantize``, one of ``group_rounding.BITS``, has them, on ``device``: a
    ``matrix_modules.QuantisedSource``. ``kept`` names the matrices that stay numbers of ``dtype``: routers, and those
    whose channels are no whole groups."""

    def __init__(self, source: PlainSource, quantize: str, device: torch.device, dtype: torch.dtype) -> None:
        self._source, self._quantize, self._device, self._dtype = source, quantize, device, dtype
        self.kept: list[str] = []

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        """See ``llama_weights.WeightSource``."""
        stored = self._source.stored(f"{name}.weight")
        made = self._made(name, stored, self.tensor(f"{name}.bias", "vector") if bias else None)
        return made if self.parts is None else self.parts.matrix(name, made)

    def experts(self, name: str, count: int) -> list[Matrix]:
        """See ``matrix_modules.QuantisedSource``."""
        biases: list[Tensor | None] = [None] * count
        if f"{name}.bias" in self._source:
            biases = list(self.tensor(f"{name}.bias", "vector").unbind())
        rows = self._source.stored(f"{name}.weight")
        own = count if self.parts is None else len(self.parts.own_experts(count))
        parts = rows.reshape(own, -1, rows.shape[-1])
        return [self._made(name, weight, bias) for weight, bias in zip(parts.unbind(), biases)]

    @property
    def parts(self) -> Parts | None:
        """Those of the source."""
        return self._source.parts

    def tensor(self, name: str, use: Use) -> Tensor:
        """See ``llama_weights.WeightSource``."""
        return self._source.tensor(name, use)

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See ``matrix_modules.QuantisedSource``."""
        return self._source.stored(name).to(dtype or self._dtype)

    def let_go(self) -> None:
        """See ``matrix_modules.QuantisedSource``: pages go as matrices are made."""

    def _made(self, name: str, stored: Tensor, bias: Tensor | None) -> Matrix:
        bits = bits_of(name, stored.shape[-1], self._quantize)
        if bits is None:
            if name not in self.kept:
                self.kept.append(name)
            return DenseMatrix(stored.to(self._device, self._dtype, copy=True), bias)
        if self._device.type != "cpu":
            return packed(rounded_matrix(stored.to(self._device), bits, bias))
        return rounded_matrix(stored, bits, bias, self._source.read)


def bits_of(name: str, channels: int, quantize: str) -> int | None:
    """Of a weight of the matrix ``name``; None for one that stays plain numbers."""
    if channels % CHANNELS or _ROUTERS.search(name):
        return None
    return max(BITS[quantize], 8) if name in _ENDS else BITS[quantize]


def rounding_notes(quantize: str | None, dtype: torch.dtype, kept: list[str]) -> list[str]:
    """What is to be said of a model that runs in integers: what of it does not."""
    if quantize is None or not kept:
        return []
    named = f"{', '.join(kept[:3])}{', ...' if kept[3:] else ''}"
    return [f"quantize={quantize!r} leaves {len(kept)} matrices in {str(dtype).removeprefix('torch.')}: {named}"]


def slow_products(device: torch.device) -> str | None:
    """Why products with integers are slower on ``device`` than plain ones; None where kernels of their own run."""
    if cpu.available() if device.type == "cpu" else triton.available():
        return None
    return "torch makes plain numbers of the weights for each product: they take less memory, and more time"
