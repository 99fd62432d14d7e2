"""Weights of safetensors files, read by their names one after another into memory that steps read fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from saccade.machine import ask_for_huge_pages, forget_file_pages, trim_memory
from saccade.models.identity import tensor_digest
from saccade.ops.matrices import DenseMatrix, Matrix

ARENA_BYTES = 1 << 26
LINE = 64  # values: weights begin at a cache line


class SafetensorsWeights:
    """The tensors of ``files`` on ``device`` in ``dtype``: a ``llama_weights.WeightSource``. ``digests``, if given,
    takes every tensor's (``identity.tensor_digest``) before it leaves the host."""

    def __init__(
        self, files: list[Path], device: torch.device, dtype: torch.dtype, digests: dict[str, str] | None = None
    ) -> None:
        self._files: dict[str, Any] = {}
        for file in files:
            tensors = safe_open(file, framework="pt")
            self._files.update(dict.fromkeys(tensors.keys(), tensors))
        self._device, self._dtype, self._digests = device, dtype, digests
        self._arena = Arena(dtype)

    def matrix(self, name: str, bias: bool) -> Matrix:
        """See ``llama_weights.WeightSource``."""
        weight = self._stored(f"{name}.weight")
        if self._device.type == "cpu":
            moved = self._arena.take(weight)
            forget_file_pages(weight)
            weight = moved
        return DenseMatrix(weight, self._small(f"{name}.bias") if bias else None)

    def table(self, name: str) -> Matrix:
        """See ``llama_weights.WeightSource``. On a CPU it stays in its file, and only what is read takes memory."""
        return DenseMatrix(self._stored(f"{name}.weight"))

    def vector(self, name: str) -> Tensor:
        """See ``llama_weights.WeightSource``."""
        return self._small(f"{name}.weight")

    def _small(self, name: str) -> Tensor:
        """A copy, by which no file stays mapped."""
        return self._stored(name).clone()

    def _stored(self, name: str) -> Tensor:
        tensor = self._files[name].get_tensor(name).to(self._dtype)
        if self._digests is not None:
            self._digests[name] = tensor_digest(tensor)
        return tensor.to(self._device)


class Arena:
    """Memory with pages of 2 MiB for weights in the order in which a step reads them: its reading is faster by a
    quarter. At most ``ARENA_BYTES`` more are needed while they move, since a file's pages are let go once copied."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._room = torch.empty(0, dtype=dtype)

    def take(self, weight: Tensor) -> Tensor:
        """A copy of ``weight``."""
        count = -(-weight.numel() // LINE) * LINE
        if count > self._room.numel():
            trim_memory()
            self._room = torch.empty(max(count, ARENA_BYTES // weight.element_size()), dtype=weight.dtype)
            ask_for_huge_pages(self._room)
        moved = self._room[: weight.numel()].view(weight.shape).copy_(weight)
        self._room = self._room[count:]
        return moved
