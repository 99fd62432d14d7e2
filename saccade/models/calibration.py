"""What methods learn of a model offline, once, stored beside its weights: ``calibration/<kind>.safetensors``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from saccade.errors import PolicyError
from saccade.files import written_whole
from saccade.methods.offline import KINDS
from saccade.models.interface import ModelSpec
from saccade.selection.head_part import WHOLE, HeadPart

FOLDER = "calibration"


def calibration_file(folder: Path, kind: str) -> Path:
    return folder / FOLDER / f"{kind}.safetensors"


def save_calibration(folder: Path, kind: str, layers: Sequence[Mapping[str, Tensor]]) -> Path:
    """Store tensors of each layer; returns the file. RequestError where the folder cannot be written."""
    file = calibration_file(folder, kind)
    flat = {f"{index}.{name}": tensor.contiguous() for index, one in enumerate(layers) for name, tensor in one.items()}
    with written_whole(file, "calibration") as aside:
        aside.write_bytes(save(flat))
    return file


class Calibrations:
    """The calibrations of the model in ``folder``, each read when it is first asked for. ``spec`` is of the ``part`` of
    the model's heads that a process has: it takes what is of these."""

    def __init__(self, spec: ModelSpec, folder: Path | None, part: HeadPart = WHOLE) -> None:
        self.spec, self.folder, self._part = spec, folder, part
        self._read: dict[str, list[dict[str, Tensor]]] = {}

    def layer(self, kinds: Sequence[str], layer: int) -> Mapping[str, Tensor] | None:
        """One layer's tensors of all ``kinds``, None for none. PolicyError naming the command where the model lacks
        one."""
        for kind in kinds:
            if kind not in self._read:
                self._read[kind] = self._load(kind)
        if len(kinds) < 2:
            return self._read[kinds[0]][layer] if kinds else None
        return {name: tensor for kind in kinds for name, tensor in self._read[kind][layer].items()}

    def has(self, kind: str) -> bool:
        """Whether there is one of ``kind``."""
        return self.folder is not None and calibration_file(self.folder, kind).is_file()

    def of_channels(self, kind: str | None) -> bool:
        """Whether calibrations of ``kind`` say something of single channels of keys."""
        return kind in KINDS and KINDS[kind].of_channels

    def _load(self, kind: str) -> list[dict[str, Tensor]]:
        if kind not in KINDS:
            raise PolicyError(
                f"calibration '{kind}' is unknown; known: {', '.join(sorted(KINDS))}; its method is to bring it"
            )
        command = f"saccade calibrate {kind} --model {self.folder or 'FOLDER'}"
        if self.folder is None or not self.has(kind):
            raise PolicyError(f"the model has no '{kind}' calibration; make it once with: {command}")
        file = calibration_file(self.folder, kind)
        try:
            stored = load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise PolicyError(f"calibration {file} cannot be used ({error}); make it again with: {command}") from None
        spec, parts = self.spec, self._part.parts

        def shapes(layer: int, parts: int = 1) -> dict[str, tuple[int, ...]]:
            kv_heads, head_dim = spec.shape(layer)
            return KINDS[kind].shapes(spec.heads * parts, kv_heads * parts, head_dim)

        wanted = {
            f"{layer}.{name}": shape for layer in range(spec.layers) for name, shape in shapes(layer, parts).items()
        }
        if {key: tuple(tensor.shape) for key, tensor in stored.items()} != wanted:
            raise PolicyError(f"calibration {file} belongs to another model; make it again with: {command}")
        odd = [key for key, tensor in stored.items() if tensor.dtype != torch.float32 or not tensor.isfinite().all()]
        if odd:
            raise PolicyError(
                f"calibration {file}: {odd[0]} holds what are no finite float32 numbers; make it again with: {command}"
            )
        return [
            {
                name: self._own(stored[f"{layer}.{name}"], shape, self._part.at(layer))
                for name, shape in shapes(layer, parts if KINDS[kind].of_layers else 1).items()
            }
            for layer in range(spec.layers)
        ]

    def _own(self, tensor: Tensor, shape: tuple[int, ...], part: HeadPart) -> Tensor:
        """The ``part`` of heads, of ``shape``, along the dimension of heads, if there is one."""
        for dim, size in enumerate(shape):
            if tensor.shape[dim] != size:
                tensor = part.own(tensor, dim)
        return tensor.contiguous()
