"""Load a local Hugging Face checkpoint folder into a runner, or refuse it with one line that says why.

Weights, config and modules come from transformers; nothing is downloaded, no code from the folder is run. transformers
fills in missing tensors at random and drops tensors it has no place for: both are refused here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from saccade.errors import ModelError
from saccade.models import attention, matrix_modules
from saccade.models.checkpoint import Checkpoint, first_line, of_first_layers, open_checkpoint, weight_files
from saccade.models.dense_weights import SafetensorsWeights
from saccade.models.families import FAMILIES, Family
from saccade.models.gguf_weights import GgufWeights
from saccade.models.headers import described_model, refuse_absent, refuse_absent_or_other
from saccade.models.hf_config import checked_config, max_position
from saccade.models.identity import (
    FoundOnce,
    ModelIdentity,
    digest_weights,
    identity_of,
    joined_digest,
)
from saccade.models.interface import ModelSpec
from saccade.models.llama import LlamaDecoder
from saccade.models.llama_loading import check_plain, fp8_matrices, load_llama
from saccade.models.llama_weights import has_shape
from saccade.models.lora import AdaptedWeights, Adapter, open_adapter
from saccade.models.matrix_modules import MatrixProduct, QuantisedSource
from saccade.models.packed_weights import PackedWeights, product_notes
from saccade.models.probe import probe_layers
from saccade.models.quiet import no_collection, quiet_transformers
from saccade.models.rounded_weights import RoundedWeights, rounding_notes
from saccade.models.runner import HFRunner
from saccade.models.target import checked_device, run_dtype
from saccade.models.text_part import renaming
from saccade.models.tokenizer import Tokenizer, load_tokenizer
from saccade.ops import fp8
from saccade.ops.group_rounding import BITS
from saccade.ops.matrices import Matrix
from saccade.selection.head_part import WHOLE, HeadPart


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint ready to run. ``notes`` are plain sentences: what differs from what the folder or caller said.
    ``part``: of its heads, where processes share them out."""

    path: Path
    spec: ModelSpec
    runner: HFRunner
    tokenizer: Tokenizer
    config: Any  # transformers' config of the model
    generation_config: GenerationConfig
    eos_token_ids: tuple[int, ...]
    device: torch.device
    notes: tuple[str, ...]
    found: FoundOnce
    part: HeadPart = WHOLE

    @property
    def identity(self) -> ModelIdentity:
        """What the model computes with. On a CPU the first who asks waits for all weights to be read once."""
        return self.found.get()

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of the weights: all but embeddings that are no output layer too."""
        if self.runner.llama is not None:
            return self.runner.llama.weights.step_bytes
        model = self.runner.model
        embedding = model.get_input_embeddings().weight
        tied = embedding is model.get_output_embeddings().weight
        by_layer = getattr(model.get_decoder(), "embed_tokens_per_layer", None)  # of which a token's row is read
        held = sum(one.nbytes for one in model.parameters()) + sum(one.nbytes for one in matrix_modules.matrices(model))
        return held - (0 if tied else embedding.nbytes) - (0 if by_layer is None else _nbytes(by_layer))

    @property
    def matrix_bytes(self) -> int:
        """What a decode step reads of weight matrices alone, the head's among them."""
        if self.runner.llama is not None:
            return self.runner.llama.weights.matrix_bytes
        modules = [one for one in self.runner.model.modules() if isinstance(one, (nn.Linear, MatrixProduct))]
        return sum(one.matrix.nbytes if isinstance(one, MatrixProduct) else one.weight.nbytes for one in modules)


def _nbytes(embedding: Any) -> int:
    """Of a module that looks rows up."""
    held = getattr(embedding, "matrix", embedding.weight)
    return int(held.nbytes)


def load_model(
    path: str | Path,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    quantize: str | None = None,
    lora: str | Path | None = None,
    layers: int | None = None,
) -> LoadedModel:
    """Load the checkpoint in folder ``path``.

    ``dtype`` is ``"auto"`` (the checkpoint's own), ``"float32"``, ``"bfloat16"``, ``"float16"`` or the torch dtype. On
    a CPU float16 becomes float32 (exact) with a note. ``quantize``: None, or one of ``group_rounding.QUANTIZATIONS``:
    matrices are rounded to 4 or 8 bits as they are loaded. ``lora``: a folder of an adapter that is added to them
    before (``models.lora``). ``layers``: the first so many of the model's layers alone. Raises ModelError, always one
    line, for a folder that is missing or broken, and for a family or feature that cannot be run correctly.
    """
    checkpoint = open_checkpoint(path)
    if layers is not None:
        checkpoint = of_first_layers(checkpoint, layers)
    target = checked_device(device)
    chosen, notes = run_dtype(checkpoint, dtype, target)
    # A tokenizer's tables are hundreds of thousands of objects, and packing weights holds no lock of Python's: they are
    # read side by side, and no collection walks through what has only just been made.
    with quiet_transformers(), no_collection(), ThreadPoolExecutor(1, "tokenizer") as beside:
        config = checked_config(checkpoint)
        reading = beside.submit(load_tokenizer, checkpoint.path)
        # As transformers reads it: a Mistral config with layer_types becomes a Ministral.
        family = FAMILIES[config.model_type]
        if quantize is not None:
            check_plain(checkpoint, quantize)
        in_fp8 = quantize in fp8.QUANTIZATIONS
        convert = fp8_matrices(checkpoint, quantize, family, config, target, chosen) if quantize and in_fp8 else None
        described = described_model(checkpoint, config, chosen)
        # Weights that leave the host, or their type, are digested while they are there; others when asked for.
        source = _quantised_source(checkpoint, config, target, chosen)
        adapter = None if lora is None else open_adapter(lora, checkpoint, described)
        integers = quantize if quantize in BITS else None
        model, llama, kept = described, None, list[str]()
        digest: str | Callable[[], str] | None = None if source is None else source.digest
        leave = source is None and (target.type != "cpu" or quantize is not None)
        if has_shape(family, config):
            llama, digest, kept = _load_llama(
                checkpoint, model, source, target, chosen, convert, integers, leave, adapter
            )
        elif source is not None:
            _fill_modules(checkpoint, model, source, target, chosen)
        else:
            model = _load_modules(checkpoint, config, chosen)
            if adapter is not None:
                adapter.add_to(model)
            digest = digest_weights(model.state_dict()) if leave else None
            if integers is not None:
                rounded = RoundedWeights(matrix_modules.ModuleTensors(model), integers, target, chosen)
                matrix_modules.fill(model, rounded, target, chosen)
                kept = rounded.kept
            model.to(target)
        notes += rounding_notes(integers, chosen, kept)
        tokenizer = reading.result()
    model.eval()
    with quiet_transformers():  # which says once of each kernel that is not installed
        spec = _spec(model, family, chosen, llama)
    runner = HFRunner(model, family, spec, llama)
    generation_config = _generation_config(checkpoint, model)
    notes += _config_notes(config)
    notes += product_notes(matrix_modules.matrices(model) if llama is None else llama.weights.read_each_step)
    for note in notes:
        warnings.warn(note, stacklevel=2)

    # A digest that is known holds no weights: of several ranks each gives back those of the others.
    known = digest
    said = model.config
    find = partial(_digest_of, runner) if known is None else known if callable(known) else lambda: str(known)
    added = None if adapter is None else adapter.name
    stored = matrix_modules.formats(model) if llama is None else llama.weights.format
    return LoadedModel(
        path=checkpoint.path,
        spec=spec,
        runner=runner,
        tokenizer=tokenizer,
        config=model.config,
        generation_config=generation_config,
        eos_token_ids=tuple(sorted({*_ids(generation_config.eos_token_id), *tokenizer.eos_token_ids})),
        device=target,
        notes=tuple(notes),
        found=FoundOnce(lambda: identity_of(said, spec, find(), stored, added)),
    )


def _digest_of(runner: HFRunner) -> str:
    return digest_weights(runner.weights)


def _quantised_source(
    checkpoint: Checkpoint, config: Any, device: torch.device, dtype: torch.dtype
) -> GgufWeights | PackedWeights | None:
    """Of weights that are not plain numbers; None where all are."""
    if checkpoint.gguf is not None:
        return GgufWeights(checkpoint.gguf, config.num_attention_heads, config.num_key_value_heads, device, dtype)
    if checkpoint.packed is not None:
        return PackedWeights(weight_files(checkpoint.path), checkpoint.packed, device, dtype)
    return None


def _load_llama(
    checkpoint: Checkpoint,
    model: Any,
    source: GgufWeights | PackedWeights | None,
    device: torch.device,
    dtype: torch.dtype,
    convert: Callable[[Matrix], Matrix] | None,
    integers: str | None,
    leave: bool,
    adapter: Adapter | None,
) -> tuple[LlamaDecoder, str | Callable[[], str] | None, list[str]]:
    """The decoder, the digest of its weights or who finds it, and the matrices that stay plain numbers."""
    if source is not None:
        return load_llama(checkpoint, model, device, convert, source), source.digest, []
    digests: dict[str, str] | None = {} if leave and integers is None else None
    where = weight_files(checkpoint.path), checkpoint.names, device, dtype, digests
    files = SafetensorsWeights(*where) if adapter is None else AdaptedWeights(adapter, *where)
    if integers is not None:
        rounded = RoundedWeights(files, integers, device, dtype)
        names = list(model.state_dict())
        return load_llama(checkpoint, model, device, convert, rounded), lambda: files.digest_of(names), rounded.kept
    llama = load_llama(checkpoint, model, device, convert, files)
    if digests is not None and model.config.tie_word_embeddings:
        digests["lm_head.weight"] = digests["model.embed_tokens.weight"]
    return llama, None if digests is None else joined_digest(digests), []


def _fill_modules(
    checkpoint: Checkpoint, model: Any, source: QuantisedSource, device: torch.device, dtype: torch.dtype
) -> None:
    """Fill transformers' modules, which hold no weights themselves, with quantised ones."""
    refuse_absent_or_other(checkpoint, matrix_modules.stored_as(model), model.config.tie_word_embeddings)
    try:
        matrix_modules.fill(model, source, device, dtype)
    except (RuntimeError, OSError) as error:  # no memory, a file that has gone
        raise ModelError(f"{checkpoint.path} cannot be loaded: {first_line(error)}") from error
    source.let_go()


def _generation_config(checkpoint: Checkpoint, model: Any) -> GenerationConfig:
    """The folder's, if it has one, else what config.json says of it."""
    if not (checkpoint.path / "generation_config.json").is_file():
        return model.generation_config
    return GenerationConfig.from_pretrained(checkpoint.path, local_files_only=True)


def _load_modules(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> Any:
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


def _spec(model: Any, family: Family, dtype: torch.dtype, llama: LlamaDecoder | None) -> ModelSpec:
    config = model.config
    layers = probe_layers(model, family, llama)
    return ModelSpec(
        family=family.model_type,
        layers=len(layers.windows),
        heads=layers.heads,
        kv_heads=layers.kv_heads,
        head_dim=layers.head_dim,
        vocab_size=model.get_output_embeddings().out_features,
        max_position=max_position(config),
        dtype=dtype,
        windows=layers.windows,
        places=layers.places,
        states=layers.states,
        depth=config.num_hidden_layers,
        value_dim=layers.value_dim,
        shapes=layers.shapes,
        reads=layers.reads,
    )


def _config_notes(config: Any) -> list[str]:
    if getattr(config, "dual_chunk_attention_config", None):
        return ["dual_chunk_attention_config is ignored: beyond the trained length answers may degrade"]
    return []


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
