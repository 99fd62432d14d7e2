"""Plain weights of another source, rounded to integers as they are loaded (``ops.group_rounding``): matrices of the
layers, and the embedding and the head, which have 8 bits at least, since all tokens go through them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from saccade.models.llama_weights import Use, WeightSource
from saccade.ops import cpu
from saccade.ops.group_rounding import BITS, CHANNELS, rounded_matrix
from saccade.ops.matrices import DenseMatrix, Matrix

_ENDS = "model.embed_tokens", "lm_head"
_ROUTERS = re.compile(
    r"(^|(?<!\.experts)\.)(router|gate|shared_expert_gate)(\.layer)?$"
)  # small, and what they choose is coarse


class PlainSource(WeightSource, Protocol):
    """A source that gives tensors of plain numbers as they lie, too."""

    def __contains__(self, name: str) -> bool: ...

    def stored(self, name: str) -> Tensor:
        """The tensor in the type that it is stored in, where it lies."""
        ...


class RoundedWeights:
    """The tensors of ``source`` as ``quantize``, one of ``group_rounding.BITS``, has them, on ``device``: a
    ``llama_weights.WeightSource``. ``kept`` names the matrices that stay numbers of ``dtype``: routers, and those whose
    channels are no whole groups."""

    def __init__(self, source: PlainSource, quantize: str, device: torch.device, dtype: torch.dtype) -> None:
        self._source, self._quantize, self._device, self._dtype = source, quantize, device, dtype
        self.kept: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def plain(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor's numbers."""
        return self._source.stored(name).to(dtype)

    def tensor(self, name: str, use: Use) -> Tensor:
        """See ``llama_weights.WeightSource``. Matrices are as they are stored."""
        return self._source.tensor(name, use) if use == "vector" else self._source.stored(name)

    def format(self, name: str) -> Callable[[Tensor, Tensor | None], Matrix]:
        """See ``llama_weights.WeightSource``."""
        own = name.removesuffix(".weight")

        def made(stored: Tensor, bias: Tensor | None) -> Matrix:
            bits = bits_of(own, stored.shape[-1], self._quantize)
            if bits is None:
                if own not in self.kept:
                    self.kept.append(own)
                return DenseMatrix(stored.to(self._device, self._dtype, copy=True), bias)
            if self._device.type != "cpu":
                return rounded_matrix(stored.to(self._device), bits, bias)
            return rounded_matrix(stored, bits, bias, self._source.read)

        return made

    def read(self, part: Tensor) -> None:
        """See ``llama_weights.WeightSource``."""
        self._source.read(part)


def bits_of(name: str, channels: int, quantize: str) -> int | None:
    """Of a weight of the matrix ``name``; None for one that stays plain numbers."""
    if channels % CHANNELS or _ROUTERS.search(name):
        return None
    return max(BITS[quantize], 8) if name in _ENDS else BITS[quantize]


def rounding_notes(quantize: str | None, device: torch.device, dtype: torch.dtype, kept: list[str]) -> list[str]:
    """What is to be said of a model that runs in integers: what does not, and where their products are slow."""
    notes = []
    if quantize is not None and kept:
        named = f"{', '.join(kept[:3])}{', ...' if kept[3:] else ''}"
        notes.append(
            f"quantize={quantize!r} leaves {len(kept)} matrices in {str(dtype).removeprefix('torch.')}: {named}"
        )
    if quantize is not None and (why := slow_products(device)) is not None:
        notes.append(f"quantize={quantize!r}: {why}")
    return notes


def slow_products(device: torch.device) -> str | None:
    """Why products with integers are slower on ``device`` than plain ones; None where kernels of their own run."""
    if device.type == "cpu" and cpu.available():
        return None
    return "torch makes plain numbers of the weights for each product: they take less memory, and more time"
