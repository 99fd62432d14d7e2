"""Plain weights of safetensors files for transformers' modules, read tensor by tensor, or a rank's part of each: files
may have experts apart, or tensors under older names, which transformers puts together in the same way."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from saccade.errors import ModelError
from saccade.models.dense_weights import SafetensorsWeights
from saccade.models.identity import joined_digest, tensor_digest
from saccade.models.llama_weights import Use
from saccade.models.matrix_modules import part_of_experts
from saccade.models.parts import Parts
from saccade.ops.matrices import DenseMatrix, Matrix

_EMBEDDINGS = "model.embed_tokens.weight", "model.embeddings.weight"  # which a head that is not stored is
# How: experts' one behind another, gate above up; or tensors one below another (OLMo hybrid's convolutions).
_PUT_TOGETHER = [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)], [(Concatenate, 0)]
_EXPERT_MATRIX = re.compile(r"(.+\.experts)\.(gate|up|down)\.(weight|bias)$")


class ModuleFiles:
    """The tensors of ``model``, whose modules may hold nothing, in ``files``, as they run in ``dtype``: a
    ``matrix_modules.QuantisedSource`` and a ``rounded_weights.PlainSource``. ``parts``: what a rank has of them, of
    which alone files are read. ModelError where transformers puts tensors together otherwise."""

    stacked = True  # experts of plain numbers lie together, as modules have them

    def __init__(self, model: Any, files: SafetensorsWeights, dtype: torch.dtype, parts: Parts | None) -> None:
        self._files, self._dtype, self.parts = files, dtype, parts
        held = model.state_dict()
        self._kinds = {name: one.dtype for name, one in held.items()}
        self._blocks: defaultdict[str, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._apart: set[str] = set()  # tensors of which files have one for each expert, in one block or two
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        for name in sorted(files.names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, held)
            block = 0
            if pattern is not None:
                converter = next(one for one in converters if pattern in one.source_patterns)
                kinds = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
                if kinds not in _PUT_TOGETHER:
                    raise ModelError(f"{target}: it is put together of tensors in a way that is not read in parts")
                block = converter.source_patterns.index(pattern)
                if (MergeModulelist, 0) in kinds:
                    self._apart.add(target)
            self._blocks[target][block].append(name)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of whole tensors, by what modules call them."""
        return {name: self._shape(name) for name in self._blocks}

    def _shape(self, name: str) -> torch.Size:
        sizes = [self._files.shape(block[0]) for block in self._in_order(name)]
        if name not in self._apart:
            return torch.Size((sum(one[0] for one in sizes), *sizes[0][1:])) if len(sizes[0]) else sizes[0]
        return torch.Size((len(self._blocks[name][0]), sum(one[0] for one in sizes), *sizes[0][1:]))

    def _in_order(self, name: str) -> list[list[str]]:
        return [block for _, block in sorted(self._blocks[name].items())]

    def __contains__(self, name: str) -> bool:
        found = _EXPERT_MATRIX.match(name)
        if found is None:
            return name in self._blocks
        start, part, bias = found[1], found[2], "_bias" if found[3] == "bias" else ""
        whole = (f"{part}_proj", *(() if part == "down" else ("gate_up_proj",)))
        return any(f"{start}.{one}{bias}" in self._blocks for one in whole)

    def stored(self, name: str) -> Tensor:
        """The tensor, or the rank's part of it, in the type that it is stored in."""
        found = _EXPERT_MATRIX.match(name)
        if found is not None:
            start = found[1]
            count = self._shape(f"{start}.down_proj")[0]
            own = None if self.parts is None else self.parts.own_experts(count)
            return part_of_experts(
                lambda held: self._put(f"{start}.{held}", own),
                lambda held: f"{start}.{held}" in self._blocks,
                found[2],
                found[3],
            )
        cut = None if self.parts is None else self.parts.cut(name, tuple(self._shape(name)))
        if cut is None:
            return self._put(name)
        if name not in self._apart:
            return cut.of(self._put(name))
        made, skipped = [], 0
        for block, (start, stop) in zip(self._in_order(name), cut.spans, strict=True):
            runs = [self._files.whole(one).narrow(cut.axis - 1, start - skipped, stop - start) for one in block]
            made.append(torch.stack(runs))
            skipped += self._files.shape(block[0])[0]
            for run in runs:
                self._files.read(run)
        return torch.cat(made, 1)

    def whole(self, name: str) -> Tensor:
        """The tensor in the type that it is stored in."""
        return self._put(name)

    def _put(self, name: str, experts: range | None = None) -> Tensor:
        """A whole tensor, or that of some ``experts``."""
        own = slice(None) if experts is None else slice(experts.start, experts.stop)
        blocks = self._in_order(name)
        if name not in self._apart:
            found = [self._files.whole(one) for block in blocks for one in block]
            whole = found[0] if len(found) == 1 else torch.cat(found)
            return whole if experts is None else whole[own]
        made = [torch.stack([self._files.whole(one) for one in block[own]]) for block in blocks]
        for one in (one for block in blocks for one in block[own]):
            self._files.read(self._files.whole(one))
        return torch.cat(made, 1)

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        """See ``llama_weights.WeightSource``."""
        weight = self.tensor(f"{name}.weight", use)
        made = DenseMatrix(weight, self.tensor(f"{name}.bias", "vector") if bias else None)
        return made if self.parts is None else self.parts.matrix(name, made)

    def tensor(self, name: str, use: Use) -> Tensor:
        """See ``llama_weights.WeightSource``."""
        return self._files.placed(self.stored(name), use)

    def experts(self, name: str, count: int) -> list[Matrix]:
        """See ``matrix_modules.QuantisedSource``: those of plain numbers lie together."""
        raise ModelError(f"{name}: experts of plain numbers lie together")

    def plain(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See ``matrix_modules.QuantisedSource``."""
        own = self.stored(name)
        made = own.to(dtype or self._dtype, copy=True, memory_format=torch.contiguous_format)
        self._files.read(own)
        return made

    def read(self, part: Tensor) -> None:
        """See ``rounded_weights.PlainSource``."""
        self._files.read(part)

    def let_go(self) -> None:
        """See ``matrix_modules.QuantisedSource``: pages go as matrices are made."""

    def digest(self) -> str:
        """Of the contents of all tensors, whole, in the types that they run in; reads the files."""
        digests = {}
        for name, kind in self._kinds.items():
            held = name if name in self._blocks else next(one for one in _EMBEDDINGS if one in self._blocks)
            digests[name] = tensor_digest(self._put(held), kind, self._files.read)
        return joined_digest(digests)
