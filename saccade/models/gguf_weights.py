"""Weights of a GGUF file as they lie in it: matrices in blocks are parts of the mapped file, nothing is written out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from saccade.models.gguf_header import GgufHeader, GgufTensor
from saccade.models.gguf_names import ROTARY, name_of, undone
from saccade.models.identity import digest_weights
from saccade.models.llama_weights import Use
from saccade.models.parts import Parts
from saccade.ops.arena import Arena
from saccade.ops.block_weights import FORMATS
from saccade.ops.dequantised import PIECE
from saccade.ops.matrices import DenseMatrix, Matrix
from saccade.ops.planes import give_back, packed

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def weights_of(header: GgufHeader) -> list[GgufTensor]:
    """The tensors of a file that are weights of the model: without what its config says, and without layers that only
    predict further tokens."""
    kind = header.architecture
    further = header.metadata.get(f"{kind}.nextn_predict_layers", 0)
    layers = header.metadata.get(f"{kind}.block_count", 0)
    last = layers - further if isinstance(layers, int) and isinstance(further, int) and further > 0 else 1 << 62

    def runs(name: str) -> bool:
        layer = re.match(r"blk\.(\d{1,6})\.", name)
        return name not in ROTARY and (layer is None or int(layer[1]) < last)

    return [one for one in header.tensors if runs(one.name)]


def stored_shapes(header: GgufHeader) -> dict[str, torch.Size]:
    """Shapes of a file's weights by transformers' names."""
    shapes = {str(name_of(header.architecture, one.name)): torch.Size(one.shape) for one in weights_of(header)}
    # A matrix of one row, of which llama.cpp's converter makes a vector.
    return {
        name: torch.Size((1, *shape)) if name.endswith(".shared_expert_gate.weight") and len(shape) == 1 else shape
        for name, shape in shapes.items()
    }


def grouped_names(header: GgufHeader) -> dict[str, bool]:
    """Whether a file's matrices are blocks, by transformers' names of their modules."""
    names = {str(name_of(header.architecture, one.name)): one.kind in FORMATS for one in weights_of(header)}
    return {name.removesuffix(".weight"): blocks for name, blocks in names.items()}


class Mapped:
    """The bytes of GGUF files, mapped when they are first asked for."""

    def __init__(self) -> None:
        self._files: dict[Path, Tensor] = {}
        self._last: Tensor | None = None

    def stored(self, tensor: GgufTensor) -> Tensor:
        """uint8 [nbytes] of a tensor. The pages of the one before are given back: most are packed by now."""
        file = tensor.file
        self.let_go()
        if file not in self._files:  # private: what is written to it stays in memory
            self._files[file] = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        self._last = self._files[file][tensor.offset : tensor.offset + tensor.nbytes]
        return self._last

    def let_go(self) -> None:
        """Give back the pages of the tensor that was last asked for."""
        if self._last is not None:
            give_back(self._last)

    def read(self, part: Tensor) -> None:
        """Give back the pages of ``part`` of a tensor, unless it is a copy."""
        first = part.data_ptr()
        if any(0 <= first - file.data_ptr() < file.nbytes for file in self._files.values()):
            give_back(part)

    def rows(self, tensor: GgufTensor) -> Tensor:
        """As stored: uint8 [rows, bytes] of blocks, or plain numbers [shape]."""
        stored = self.stored(tensor)
        if tensor.kind in FORMATS:
            return stored.view(math.prod(tensor.shape[:-1]), -1)
        return stored.view(_PLAIN[tensor.kind]).view(tensor.shape)

    def numbers(self, tensor: GgufTensor) -> Tensor:
        """float32 [shape]."""
        return _numbers(self.rows(tensor), tensor).view(tensor.shape)


def _numbers(rows: Tensor, tensor: GgufTensor) -> Tensor:
    kind = FORMATS.get(tensor.kind)
    if kind is None:
        return rows.float()
    held = kind(rows)
    made, step = torch.empty(len(rows), held.channels), max(1, PIECE // held.channels)
    for first in range(0, len(rows), step):
        part = torch.arange(first, min(first + step, len(rows)))
        made[first : first + step] = held.rows(part, torch.float32)
    return made


class GgufWeights:
    """The tensors of a GGUF file on ``device``, plain numbers in ``dtype``: a ``llama_weights.WeightSource``.
    ``heads``, ``kv_heads``: the model's; ``parts``: what a rank has of them."""

    def __init__(
        self,
        header: GgufHeader,
        heads: int,
        kv_heads: int,
        device: torch.device,
        dtype: torch.dtype,
        parts: Parts | None = None,
    ) -> None:
        self.shapes = stored_shapes(header)
        self._architecture = header.architecture
        self._tensors = {str(name_of(header.architecture, one.name)): one for one in weights_of(header)}
        self._mapped = Mapped()
        self._heads, self._kv_heads = heads, kv_heads
        self._device, self._dtype, self.parts = device, dtype, parts
        self._arena = Arena()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        """See ``llama_weights.WeightSource``."""
        stored, kind = self.tensor(f"{name}.weight", use), self._kind(name)
        made = packed(kind(stored, self.tensor(f"{name}.bias", "vector") if bias else None), self.read)
        return made if self.parts is None else self.parts.matrix(name, made)

    def experts(self, name: str, count: int) -> list[Matrix]:
        """Matrices of the same name of so many experts, stored one after another."""
        biases: list[Tensor | None] = [None] * count
        if f"{name}.bias" in self:
            biases = list(self.tensor(f"{name}.bias", "vector").unbind())
        rows = self.tensor(f"{name}.weight", "matrix")
        own = count if self.parts is None else len(self.parts.own_experts(count))
        parts = rows.reshape(own, -1, rows.shape[-1])
        return [packed(self._kind(name)(weight, bias), self.read) for weight, bias in zip(parts.unbind(), biases)]

    def _kind(self, name: str) -> Callable[[Tensor, Tensor | None], Matrix]:
        return FORMATS.get(self._tensors[f"{name}.weight"].kind, DenseMatrix)

    def tensor(self, name: str, use: Use) -> Tensor:
        """See ``llama_weights.WeightSource``: uint8 [outputs, bytes] of blocks, or plain numbers. Vectors are plain."""
        found = self._tensors[name]
        if use == "vector" or found.kind not in FORMATS:
            if use == "matrix" and self._device.type == "cpu":
                stored = self._undone(found, self._mapped.rows(found)).view(self.shapes[name])
                return self._arena.take(self._own(name, stored), self._dtype, self.read)
            return self.plain(name).to(self._device)
        return self._own(name, self._undone(found, self._mapped.rows(found))).to(self._device)

    def _own(self, name: str, whole: Tensor) -> Tensor:
        return whole if self.parts is None else self.parts.tensor(name, whole)

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor's numbers, on the host."""
        found = self._tensors[name]
        rows = self._mapped.rows(found)
        if found.kind in FORMATS or rows.dim() == 1:
            rows = _numbers(rows, found)
        return self._own(name, self._undone(found, rows).view(self.shapes[name])).to(dtype or self._dtype).contiguous()

    def read(self, part: Tensor) -> None:
        """Let go of ``part`` of a tensor, which is not read again."""
        self._mapped.read(part)

    def let_go(self) -> None:
        """Give back the pages of the last tensor, once all are loaded."""
        self._mapped.let_go()

    def digest(self) -> str:
        """Of the contents of all weights, by transformers' names; reads the whole file."""
        weights = {name: self._mapped.rows(tensor) for name, tensor in self._tensors.items()}
        return digest_weights(weights, read=self._mapped.read)

    def _undone(self, tensor: GgufTensor, rows: Tensor) -> Tensor:
        return undone(self._architecture, tensor.name, rows, self._heads, self._kv_heads)
