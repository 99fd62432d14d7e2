"""Quantised weights of safetensors files: matrices are made of the several tensors that they are stored in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from saccade.errors import ModelError, SaccadeError
from saccade.machine import forget_file_pages
from saccade.models.dense_weights import SafetensorsWeights
from saccade.models.identity import joined_digest, tensor_digest
from saccade.models.llama_weights import Use
from saccade.models.packed_header import PackedHeader
from saccade.models.parts import Parts
from saccade.ops.block_weights import BlockMatrix
from saccade.ops.dequantised import DequantisedMatrix
from saccade.ops.fp8_weights import ScaledFp8Matrix
from saccade.ops.group_weights import GroupMatrix, PermutedMatrix
from saccade.ops.matrices import Matrix
from saccade.ops.planes import packed


def product_notes(matrices: Iterable[Matrix]) -> list[str]:
    """What of the formats of ``matrices``, which a step multiplies by, has no kernel, as sentences."""
    parts, notes = list(matrices), []
    inner = [one.inner if isinstance(one, PermutedMatrix) else one for one in parts]
    left = [one for one in inner if isinstance(one, DequantisedMatrix) and not one.has_kernel]
    # Blocks have kernels on every CPU for which the package was built.
    if slow := {str(one.format) for one in left if one.weight.is_cuda or not isinstance(one, BlockMatrix)}:
        notes.append(
            f"no kernel here multiplies weights in {', '.join(sorted(slow))}: torch dequantises a piece of a matrix at "
            "a time, for each product"
        )
    if any(isinstance(one, PermutedMatrix) for one in parts):
        notes.append(
            "channels of weights are in an order of their own (desc_act): they are sorted for each product, and layers "
            "do not run in one call"
        )
    return notes


class PackedWeights(SafetensorsWeights):
    """As :class:`SafetensorsWeights`, with the matrices of ``header`` in their formats."""

    def __init__(
        self,
        files: list[Path],
        header: PackedHeader,
        device: torch.device,
        dtype: torch.dtype,
        parts: Parts | None = None,
    ) -> None:
        super().__init__(files, header.stored_names, device, dtype, parts=parts)
        self._header, self._folder = header, files[0].parent

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        """See ``llama_weights.WeightSource``. ModelError for a matrix whose numbers cannot be."""
        if name not in self._header.formats:
            return super().matrix(name, bias, use)
        made = packed(self._made(name, bias) if self.parts is None else self._part(name, bias, self.parts))
        if isinstance(made, (GroupMatrix, ScaledFp8Matrix)) and self._device.type == "cpu":
            made = made.like([one.clone() for one in made.stored], made.bias)  # by which no file stays mapped
        for part in self._header.parts[name]:
            forget_file_pages(self.whole(f"{name}.{part}"))
        return made if self.parts is None else self.parts.matrix(name, made)

    def _made(self, name: str, bias: bool) -> Matrix:
        return self._of(name, self._held(name), self._bias(name, bias))

    def _part(self, name: str, bias: bool, parts: Parts) -> Matrix:
        """What a rank has: of the tensors, or where words or blocks of them hold others' outputs too, of the matrix."""
        shape = tuple(self._header.shapes.get(f"{name}.weight", ()))  # none of a matrix of one expert, which is whole
        cut = parts.cut(f"{name}.weight", shape) if shape else None
        if cut is None:
            return self._made(name, bias)
        own = self._header.formats[name].outputs(self._held(name), cut.spans, shape[0])
        if own is None:
            return parts.split(name, self._made(name, bias))
        held = self._bias(name, bias)
        return self._of(name, own, None if held is None else parts.tensor(f"{name}.bias", held))

    def _held(self, name: str) -> dict[str, Tensor]:
        return {part: self.whole(f"{name}.{part}") for part in self._header.parts[name]}

    def _of(self, name: str, stored: dict[str, Tensor], bias: Tensor | None) -> Matrix:
        read, held = self._header.formats[name], {part: one.to(self._device) for part, one in stored.items()}
        try:
            made = read.matrix(held, bias, self._dtype)
        except SaccadeError as error:
            raise ModelError(f"{self._folder}: {name}: {error}") from error
        return made

    def experts(self, name: str, count: int) -> list[Matrix]:
        """See ``matrix_modules.QuantisedSource``."""
        own = range(count) if self.parts is None else self.parts.own_experts(count)
        if name in self._header.experts:
            return [self.matrix(self._header.experts[name][one]) for one in own]
        start, _, part = name.rpartition(".")
        whole = f"{start}.{'down' if part == 'down' else 'gate_up'}_proj"  # of all experts, gate and up in turns
        turn = slice(None) if part == "down" else slice(part == "up", None, 2)
        kept = slice(own.start, own.stop)
        stacked = self._of(whole, {part: one[kept] for part, one in self._held(whole).items()}, None)
        rows = stacked.weight.view(len(own), -1, stacked.weight.shape[1])[:, turn]
        biases = self._vector(f"{whole}.bias")[kept, turn]
        return [
            packed(stacked.like([weight.contiguous()], bias.contiguous()))
            for weight, bias in zip(rows.unbind(), biases.unbind())
        ]

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See ``matrix_modules.QuantisedSource``."""
        return self.stored(name).to(dtype or self._dtype, copy=True)

    def let_go(self) -> None:
        """See ``matrix_modules.QuantisedSource``: pages go as matrices are made."""

    def _bias(self, name: str, wanted: bool) -> Tensor | None:
        """AutoGPTQ stored zeros where a model has none."""
        if wanted:
            return self._vector(f"{name}.bias")
        if f"{name}.bias" in self._files and bool(self.whole(f"{name}.bias").any()):
            raise ModelError(f"{self._folder}: {name}: has a bias, which the model that config.json describes has not")
        return None

    def _vector(self, name: str) -> Tensor:
        """Of all outputs, of which a matrix in groups is made before it is cut."""
        return self.whole(name).to(self._dtype, copy=True).to(self._device)

    def digest(self) -> str:
        """Of the contents of all tensors as they are stored, and what they mean; reads the files."""
        digests = {name: tensor_digest(self.whole(name)) for name in self._files}
        meanings = {f"{name} is": one.meaning for name, one in self._header.formats.items()}
        return joined_digest({**digests, **meanings})
