"""Load a model of the Llama shape: its weights by their names from the files, without modules that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import Checkpoint, first_line
from saccade.models.families import FAMILIES, Family
from saccade.models.gguf_weights import GgufWeights
from saccade.models.headers import refuse_absent_or_other
from saccade.models.llama import LlamaDecoder
from saccade.models.llama_weights import WeightSource, has_shape, read_weights
from saccade.ops import fp8
from saccade.ops.fp8_weights import Fp8Matrix
from saccade.ops.matrices import Matrix


def check_plain(checkpoint: Checkpoint, quantize: str) -> None:
    """ModelError for a checkpoint whose weights are quantised already."""
    if checkpoint.gguf is not None or checkpoint.packed is not None:
        named = checkpoint.path.name if checkpoint.gguf is None else checkpoint.gguf.path.name
        raise ModelError(
            f"{checkpoint.path}: quantize={quantize!r} is for weights of 16 or 32 bits; {named} has fewer: leave it out"
        )


def fp8_matrices(
    checkpoint: Checkpoint, quantize: str, family: Family, config: Any, device: torch.device, dtype: torch.dtype
) -> Callable[[Matrix], Matrix]:
    """What makes a layer's matrices such of 8-bit floats. ModelError where their products cannot run."""
    where = f"{checkpoint.path}: quantize={quantize!r}"
    if not has_shape(family, config):
        shaped = ", ".join(one.model_type for one in FAMILIES.values() if one.llama_shape is not None)
        what = family.model_type if family.llama_shape is None else f"{family.model_type} with hidden_act"
        what += "" if family.llama_shape is None else f"={shown(config.hidden_act)}"
        raise ModelError(f"{where} is for models whose layers are Llama's ({shaped}), not {what}; leave it out")
    reason = None if quantize == "fp8_reference" else fp8.why_not(device, dtype)
    if reason is not None:
        raise ModelError(
            f"quantize='fp8' cannot run: {reason}; leave it out, or see what it would answer with "
            "quantize='fp8_reference', which is slow"
        )

    def convert(matrix: Matrix) -> Matrix:
        if matrix.outputs % fp8.MULTIPLE or matrix.channels % fp8.MULTIPLE:
            raise ModelError(
                f"quantize: a product of {matrix.channels} by {matrix.outputs} channels cannot run in FP8, which takes "
                f"multiples of {fp8.MULTIPLE}; leave quantize out, or have fewer processes share the model out"
            )
        return Fp8Matrix.of(matrix.weight, matrix.bias, reference=quantize == "fp8_reference")

    return convert


def load_llama(
    checkpoint: Checkpoint,
    model: Any,
    device: torch.device,
    convert: Callable[[Matrix], Matrix] | None,
    source: WeightSource,
) -> LlamaDecoder:
    """Fill the matrices of ``model``, which holds none itself, by their names, from ``source``."""
    tied = bool(model.config.tie_word_embeddings)
    refuse_absent_or_other(checkpoint, {name: one.shape for name, one in model.state_dict().items()}, tied)
    try:
        weights = read_weights(model, source, join=device.type == "cuda", convert=convert)
    except (RuntimeError, OSError, SafetensorError) as error:  # no memory, a file that has gone
        raise ModelError(f"{checkpoint.path} cannot be loaded: {first_line(error)}") from error
    if isinstance(source, GgufWeights):
        source.let_go()
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config).to(device)  # which holds factors of its own
    return LlamaDecoder(weights)
