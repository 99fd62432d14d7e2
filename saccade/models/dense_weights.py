"""Weights of safetensors files, read by their names one after another into memory that steps read fast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from saccade.machine import forget_file_pages
from saccade.models.identity import digest_weights, tensor_digest
from saccade.models.llama_weights import Use
from saccade.models.parts import Parts
from saccade.ops.arena import Arena
from saccade.ops.matrices import DenseMatrix, Matrix


class SafetensorsWeights:
    """The tensors of ``files``, called by ``names`` there, on ``device`` in ``dtype``: a
    ``llama_weights.WeightSource``. ``digests``, if given, takes every tensor's (``identity.tensor_digest``) before it
    leaves the host. ``parts``: what a rank has of them, of which alone files are read."""

    def __init__(
        self,
        files: list[Path],
        names: Mapping[str, str],
        device: torch.device,
        dtype: torch.dtype,
        digests: dict[str, str] | None = None,
        parts: Parts | None = None,
    ) -> None:
        opened: dict[str, Any] = {}
        for file in files:
            tensors = safe_open(file, framework="pt")
            opened.update(dict.fromkeys(tensors.keys(), tensors))
        self.names = dict(names)
        self._files = {own: opened[name] for own, name in names.items()}
        self._device, self._dtype, self._digests = device, dtype, digests
        self._arena = Arena()
        self.parts = parts

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        """See ``llama_weights.WeightSource``."""
        weight = self.tensor(f"{name}.weight", use)
        made = DenseMatrix(weight, self.tensor(f"{name}.bias", "vector") if bias else None)
        return made if self.parts is None else self.parts.matrix(name, made)

    def tensor(self, name: str, use: Use) -> Tensor:
        """See ``llama_weights.WeightSource``. On a CPU a table stays in its file: only what is read takes memory."""
        stored = self.stored(name)
        if self._digests is not None:
            self._digests[name] = tensor_digest(stored, self._dtype)
        return self.placed(stored, use)

    def placed(self, stored: Tensor, use: Use) -> Tensor:
        """What :meth:`tensor` makes of a tensor as it is stored."""
        if self._device.type != "cpu":
            placed = stored.to(self._dtype).to(self._device)
        elif use == "matrix":
            return self._arena.take(stored, self._dtype, self.read)
        else:  # a copy by which no file stays mapped
            placed = stored.to(self._dtype, copy=use != "table", memory_format=torch.contiguous_format)
        if placed is not stored:
            forget_file_pages(stored)
        return placed

    def stored(self, name: str) -> Tensor:
        """The tensor, or the rank's part of it, in the type that it is stored in, part of the mapped file."""
        whole = self.whole(name)
        return whole if self.parts is None else self.parts.tensor(name, whole)

    def shape(self, name: str) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self._files[name].get_slice(self.names[name]).get_shape())

    def whole(self, name: str) -> Tensor:
        """The tensor in the type that it is stored in, part of the mapped file: what is not touched is not read."""
        return self._files[name].get_tensor(self.names[name])

    def digest_of(self, names: Iterable[str]) -> str:
        """Of the contents of all weights ``names`` in the dtype that they run in; reads the files. A head that is not
        stored is the embedding."""
        weights = {name: self.whole(name if name in self._files else "model.embed_tokens.weight") for name in names}
        return digest_weights(weights, self._dtype, self.read)

    def read(self, part: Tensor) -> None:
        """See ``rounded_weights.PlainSource``."""
        forget_file_pages(part)
