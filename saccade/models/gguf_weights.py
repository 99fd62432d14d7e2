"""Weights of a GGUF file as they lie in it: matrices in blocks are parts of the mapped file, nothing is written out."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from saccade.models.gguf_folder import plain
from saccade.models.gguf_header import GgufHeader, GgufTensor, read_header
from saccade.models.gguf_names import FREQUENCIES, name_of, undone
from saccade.models.identity import tensor_digest
from saccade.models.llama_weights import Use
from saccade.ops.block_weights import FORMATS
from saccade.ops.matrices import DenseMatrix, Matrix


def stored_shapes(header: GgufHeader) -> dict[str, torch.Size]:
    """Shapes of a file's weights by transformers' names."""
    return {str(name_of(header.architecture, one.name)): torch.Size(one.shape) for one in _weights(header)}


def _weights(header: GgufHeader) -> list[GgufTensor]:
    return [one for one in header.tensors if one.name != FREQUENCIES]


class GgufWeights:
    """The tensors of a GGUF ``file`` on ``device``, plain numbers in ``dtype``: a ``llama_weights.WeightSource``.
    ``heads``, ``kv_heads``: the model's. ``digests``, if given, takes every tensor's
    (``identity.tensor_digest``) before it leaves the host."""

    def __init__(
        self,
        file: Path,
        heads: int,
        kv_heads: int,
        device: torch.device,
        dtype: torch.dtype,
        digests: dict[str, str] | None = None,
    ) -> None:
        self._header = read_header(file)
        self._tensors = {str(name_of(self._header.architecture, one.name)): one for one in _weights(self._header)}
        self._bytes = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)  # mapped, private
        self._heads, self._kv_heads = heads, kv_heads
        self._device, self._dtype, self._digests = device, dtype, digests

    def format(self, name: str) -> type[Matrix]:
        """See ``llama_weights.WeightSource``."""
        return FORMATS.get(self._tensors[name].kind, DenseMatrix)

    def tensor(self, name: str, use: Use) -> Tensor:
        """See ``llama_weights.WeightSource``: uint8 [outputs, bytes] of blocks, or plain numbers."""
        header, found = self._header, self._tensors[name]
        if found.kind in FORMATS:
            rows = math.prod(found.shape[:-1])
            stored = self._bytes[found.offset : found.offset + found.nbytes].view(rows, -1)
        else:
            stored = torch.cat(list(plain(header.path, found)))
        stored = undone(header.architecture, found.name, stored, self._heads, self._kv_heads)
        if found.kind not in FORMATS:
            stored = stored.to(self._dtype)
        if self._digests is not None:
            self._digests[name] = tensor_digest(stored)
        return stored.to(self._device)
