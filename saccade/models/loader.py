"""Load a local Hugging Face checkpoint folder into a runner, or refuse it with one line that says why.

Weights, config and modules come from transformers; nothing is downloaded, no code from the folder is run. transformers
fills in missing tensors at random and drops tensors it has no place for: both are refused here.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from saccade.models import matrix_modules
from saccade.models.checkpoint import Checkpoint, of_first_layers, open_checkpoint
from saccade.models.families import FAMILIES, Family
from saccade.models.filling import Filling
from saccade.models.headers import described_model
from saccade.models.hf_config import checked_config, max_position
from saccade.models.identity import FoundOnce, ModelIdentity, digest_weights, identity_of
from saccade.models.interface import ModelSpec
from saccade.models.llama import LlamaDecoder
from saccade.models.llama_loading import check_plain, fp8_matrices
from saccade.models.lora import open_adapter
from saccade.models.matrix_modules import MatrixProduct
from saccade.models.packed_weights import product_notes
from saccade.models.probe import probe_layers
from saccade.models.quiet import no_collection, quiet_transformers
from saccade.models.rounded_weights import rounding_notes
from saccade.models.runner import HFRunner
from saccade.models.shards import Share, whole_spec
from saccade.models.target import checked_device, run_dtype
from saccade.models.tokenizer import Tokenizer, load_tokenizer
from saccade.ops import fp8
from saccade.ops.group_rounding import BITS
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
    def balances_modules(self) -> bool:
        """See HFRunner."""
        return self.runner.balances_modules

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
    share: Share | None = None,
) -> LoadedModel:
    """Load the checkpoint in folder ``path``.

    ``dtype`` is ``"auto"`` (the checkpoint's own), ``"float32"``, ``"bfloat16"``, ``"float16"`` or the torch dtype. On
    a CPU float16 becomes float32 (exact) with a note. ``quantize``: None, or one of ``group_rounding.QUANTIZATIONS``:
    matrices are rounded to 4 or 8 bits as they are loaded. ``lora``: a folder of an adapter that is added to them
    before (``models.lora``). ``layers``: the first so many of the model's layers alone. ``share``: a rank's part of it
    alone, of which alone it reads the files. Raises ModelError, always one line, for a folder that is missing or
    broken, and for a family or feature that cannot be run correctly.
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
        adapter = None if lora is None else open_adapter(lora, checkpoint, described)
        integers = quantize if quantize in BITS else None
        filling = Filling(checkpoint, target, chosen, convert, integers, adapter, share)
        filled, parts = filling.fill(described, family)
        model, llama, digest = filled.model, filled.llama, filled.digest
        notes += rounding_notes(integers, chosen, filled.kept)
        tokenizer = reading.result()
    model.eval()
    alone = nullcontext() if share is None else share.apart()
    with quiet_transformers(), alone:  # transformers says once of each kernel that is not installed
        spec = _spec(model, family, chosen, llama)
    if parts is not None and spec.states is not None:
        spec = replace(spec, states=parts.states.format(spec.states))
    whole = spec if parts is None else whole_spec(spec, parts.head.parts)
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
        found=FoundOnce(lambda: identity_of(said, whole, find(), stored, added)),
        part=WHOLE if parts is None else parts.head,
    )


def _digest_of(runner: HFRunner) -> str:
    return digest_weights(runner.weights)


def _generation_config(checkpoint: Checkpoint, model: Any) -> GenerationConfig:
    """The folder's, if it has one, else what config.json says of it."""
    if not (checkpoint.path / "generation_config.json").is_file():
        return model.generation_config
    return GenerationConfig.from_pretrained(checkpoint.path, local_files_only=True)


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
