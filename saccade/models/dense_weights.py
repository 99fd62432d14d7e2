"""Weights of safetensors files, read by their names one after another into memory that steps read fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from saccade.machine import forget_file_pages
from saccade.models.identity import tensor_digest
from saccade.models.llama_weights import Use
from saccade.ops.arena import Arena
from saccade.ops.matrices import DenseMatrix, Matrix


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
        self._arena = Arena()

    def format(self, name: str) -> type[Matrix]:
        """See ``llama_weights.WeightSource``."""
        return DenseMatrix

    def tensor(self, name: str, use: Use) -> Tensor:
        """See ``llama_weights.WeightSource``. On a CPU a table stays in its file: only what is read takes memory."""
        stored = self._files[name].get_tensor(name)
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
