"""Weights of safetensors files, read by their names one after another into memory that steps read fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from saccade.machine import ask_for_huge_pages, forget_file_pages, trim_memory
from saccade.models.identity import tensor_digest
from saccade.models.llama_weights import Use
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

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        """See ``llama_weights.WeightSource``."""
        weight = self.tensor(f"{name}.weight", use)
        return DenseMatrix(weight, self.tensor(f"{name}.bias", "vector") if bias else None)

    def tensor(self, name: str, use: Use) -> Tensor:
        """See ``llama_weights.WeightSource``. On a CPU a table stays in its file: only what is read takes memory."""
        stored = self._read(name)
        tensor = stored.to(self._dtype)
        if self._digests is not None:
            self._digests[name] = tensor_digest(tensor)
        if self._device.type != "cpu":
            placed = tensor.to(self._device)
        elif use == "matrix":
            placed = self._arena.take(tensor)
        else:
            placed = tensor if use == "table" else tensor.clone()  # by which no file stays mapped
        if placed is not stored:
            forget_file_pages(stored)
        return placed

    def _read(self, name: str) -> Tensor:
        """As it is stored: part of its file, mapped."""
        return self._files[name].get_tensor(name)


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
