"""Weights of a checkpoint, where they belong: in our matrices of the Llama shape, or in transformers' modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from saccade.errors import ModelError
from saccade.models import attention, matrix_modules
from saccade.models.checkpoint import Checkpoint, first_line, weight_files
from saccade.models.dense_weights import SafetensorsWeights
from saccade.models.families import Family
from saccade.models.gguf_weights import GgufWeights, grouped_names
from saccade.models.headers import refuse_absent, refuse_absent_or_other
from saccade.models.identity import digest_weights, joined_digest
from saccade.models.llama import LlamaDecoder
from saccade.models.llama_loading import load_llama
from saccade.models.llama_weights import has_shape
from saccade.models.lora import AdaptedWeights, Adapter
from saccade.models.matrix_modules import QuantisedSource
from saccade.models.module_files import ModuleFiles
from saccade.models.packed_weights import PackedWeights
from saccade.models.part_modules import share_modules
from saccade.models.parts import Parts
from saccade.models.rounded_weights import RoundedWeights, bits_of
from saccade.models.shards import Share
from saccade.models.text_part import renaming
from saccade.ops.matrices import Matrix


@dataclass(frozen=True)
class Filled:
    """A checkpoint's weights: ``llama``, if its layers are of that shape, has them, and ``model``'s modules nothing.
    ``digest``: of all weights, or who finds it; None where modules hold them. ``kept``: matrices that stay plain
    numbers where others are rounded."""

    model: Any
    llama: LlamaDecoder | None
    digest: str | Callable[[], str] | None
    kept: list[str]


@dataclass(frozen=True)
class Filling:
    """How the weights of ``checkpoint`` are to run: on ``device`` in ``dtype``; each layer's matrices made others by
    ``convert``; rounded to ``integers``; with ``adapter`` added; ``share``: as those of one of several ranks."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    convert: Callable[[Matrix], Matrix] | None
    integers: str | None
    adapter: Adapter | None
    share: Share | None

    def fill(self, model: Any, family: Family) -> tuple[Filled, Parts | None]:
        """The weights for ``model``, whose modules hold no memory; what a rank has of them. ModelError where they are
        not there, or of other shapes."""
        parts = None
        if self.share is not None:
            parts = Parts(model, family, self.share, self._grouped())
        source = self._quantised(model.config, parts)
        shaped = has_shape(family, model.config)
        filled = self._llama(model, source, parts) if shaped else self._modules(model, source, parts)
        return filled, parts

    def _grouped(self) -> Callable[[str, int], bool]:
        """Whether the matrix of a name, of so many channels, is stored in groups of them."""
        packed, header, integers = self.checkpoint.packed, self.checkpoint.gguf, self.integers
        if header is not None:
            grouped = grouped_names(header)
            return lambda name, channels: grouped.get(name, grouped["model.embed_tokens"])  # a head that is no other
        if packed is not None:
            return lambda name, channels: name in packed.formats
        if integers is not None:
            return lambda name, channels: bits_of(name, channels, integers) is not None
        return lambda name, channels: False

    def _quantised(self, config: Any, parts: Parts | None) -> GgufWeights | PackedWeights | None:
        """Of weights that are not plain numbers; None where all are."""
        checkpoint, where = self.checkpoint, (self.device, self.dtype, parts)
        if checkpoint.gguf is not None:
            return GgufWeights(checkpoint.gguf, config.num_attention_heads, config.num_key_value_heads, *where)
        if checkpoint.packed is not None:
            return PackedWeights(weight_files(checkpoint.path), checkpoint.packed, *where)
        return None

    @property
    def _leaves(self) -> bool:
        """Whether plain weights leave the host, or their type, so that they are digested while they are there."""
        return self.device.type != "cpu" or self.integers is not None or self.convert is not None

    def _files(self, digests: dict[str, str] | None, parts: Parts | None) -> SafetensorsWeights:
        checkpoint = self.checkpoint
        where = weight_files(checkpoint.path), checkpoint.names, self.device, self.dtype, digests, parts
        return SafetensorsWeights(*where) if self.adapter is None else AdaptedWeights(self.adapter, *where)

    def _llama(self, model: Any, source: GgufWeights | PackedWeights | None, parts: Parts | None) -> Filled:
        names = list(model.state_dict())
        if source is not None:
            llama = load_llama(self.checkpoint, model, self.device, self.convert, source)
            return Filled(model, llama, source.digest, [])
        digests: dict[str, str] | None = {} if self._leaves and self.integers is None and parts is None else None
        files = self._files(digests, parts)
        if self.integers is not None:
            rounded = RoundedWeights(files, self.integers, self.device, self.dtype)
            llama = load_llama(self.checkpoint, model, self.device, self.convert, rounded)
            return Filled(model, llama, lambda: files.digest_of(names), rounded.kept)
        llama = load_llama(self.checkpoint, model, self.device, self.convert, files)
        if parts is not None:
            return Filled(model, llama, lambda: files.digest_of(names), [])
        if digests is not None and model.config.tie_word_embeddings:
            digests["lm_head.weight"] = digests["model.embed_tokens.weight"]
        return Filled(model, llama, None if digests is None else joined_digest(digests), [])

    def _modules(self, model: Any, source: GgufWeights | PackedWeights | None, parts: Parts | None) -> Filled:
        if source is not None:
            self._fill(self.checkpoint, matrix_modules.stored_as(model), model, source, parts)
            return Filled(model, None, source.digest, [])
        if parts is not None:
            return self._module_parts(model, parts)
        model = load_modules(self.checkpoint, model.config, self.dtype)
        if self.adapter is not None:
            self.adapter.add_to(model)
        digest = digest_weights(model.state_dict()) if self._leaves else None
        kept: list[str] = []
        if self.integers is not None:
            tensors = matrix_modules.ModuleTensors(model)
            rounded = RoundedWeights(tensors, self.integers, self.device, self.dtype)
            matrix_modules.fill(model, rounded, self.device, self.dtype)
            kept = rounded.kept
        model.to(self.device)
        return Filled(model, None, digest, kept)

    def _module_parts(self, model: Any, parts: Parts) -> Filled:
        """transformers' modules with a rank's part of plain weights."""
        files = ModuleFiles(model, self._files(None, None), self.dtype, parts)
        demanded = {name: one.shape for name, one in model.state_dict().items()}
        checkpoint = replace(self.checkpoint, shapes=files.shapes)
        if self.integers is None:
            self._fill(checkpoint, demanded, model, files, parts)
            return Filled(model, None, files.digest, [])
        rounded = RoundedWeights(files, self.integers, self.device, self.dtype)
        self._fill(checkpoint, demanded, model, rounded, parts)
        return Filled(model, None, files.digest, rounded.kept)

    def _fill(
        self,
        checkpoint: Checkpoint,
        demanded: Mapping[str, torch.Size],
        model: Any,
        source: QuantisedSource,
        parts: Parts | None,
    ) -> None:
        """Fill transformers' modules, which hold no weights themselves."""
        refuse_absent_or_other(checkpoint, demanded, matrix_modules.is_tied(model))
        try:
            matrix_modules.fill(model, source, self.device, self.dtype)
        except (RuntimeError, OSError) as error:  # no memory, a file that has gone
            raise ModelError(f"{checkpoint.path} cannot be loaded: {first_line(error)}") from error
        source.let_go()
        if parts is not None:
            share_modules(model, parts)


def load_modules(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> Any:
    """transformers' modules with their weights."""
    loaded: Any  # (model, loading info); the stubs know only the call without the info
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=dtype,
            attn_implementation=attention.ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that they are reported by name, and refused
            output_loading_info=True,
            key_mapping=renaming(checkpoint.whole, checkpoint.names.values()),
        )
    except Exception as error:  # transformers and safetensors raise many kinds
        raise ModelError(f"{checkpoint.path} cannot be loaded: {first_line(error)}") from error
    model, info = loaded
    mismatched = [str(key[0]) if isinstance(key, tuple) else str(key) for key in info["mismatched_keys"]]
    if mismatched:
        raise ModelError(f"{checkpoint.path}: {sorted(mismatched)[0]} has a shape that config.json does not describe")
    refuse_absent(checkpoint, info["missing_keys"], checkpoint.shapes.keys() & info["unexpected_keys"])
    if info["error_msgs"]:
        raise ModelError(f"{checkpoint.path} cannot be loaded: {' '.join(str(info['error_msgs'][0]).split())[:300]}")
    return model
