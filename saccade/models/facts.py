"""What a checkpoint is and what it takes, before its weights are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import open_checkpoint
from saccade.models.families import FAMILIES
from saccade.models.headers import described_model, refuse_absent_or_other
from saccade.models.hf_config import checked_config, max_position
from saccade.models.llama_loading import check_plain
from saccade.models.llama_weights import has_shape
from saccade.models.matrix_modules import stored_as
from saccade.models.quiet import quiet_transformers
from saccade.models.rounded_weights import bits_of
from saccade.models.target import run_dtype
from saccade.models.tokenizer import load_tokenizer
from saccade.ops.group_rounding import BITS, CHANNELS


@dataclass(frozen=True)
class ModelFacts:
    """``architecture``: GGUF's name of the family, None of a folder. ``formats``: bytes of weights by how they are
    stored. ``context``: the longest sequence in tokens. ``windows``: layers that read a window of it alone.
    ``token_bytes``: of a token's keys and values in all layers, in ``dtype``. ``tokenizer``: its kind, None without
    one. ``own_loop``: whether layers run in our loop of Llama's shape, else as transformers' modules."""

    path: Path
    family: str
    architecture: str | None
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    windows: int
    vocabulary: int
    dtype: str
    formats: dict[str, int]
    token_bytes: int
    tokenizer: str | None
    chat_template: bool
    own_loop: bool

    @property
    def weight_bytes(self) -> int:
        """Of all weights, as they are stored."""
        return sum(self.formats.values())

    def tokens_in(self, memory: int) -> int:
        """Tokens whose keys and values ``memory`` bytes hold beside the weights, at most the context."""
        return max(0, min(self.context, (memory - self.weight_bytes) // self.token_bytes))


def facts_of(folder: Path, quantize: str | None = None) -> ModelFacts:
    """Of the checkpoint in ``folder`` (``folders.checkpoint_folder``), which runs on a CPU in its own dtype.
    ``quantize``: None, or one of ``group_rounding.BITS``, as its weights are rounded to then. ModelError as of the
    loader for what does not load."""
    if quantize is not None and quantize not in BITS:
        raise ModelError(f"quantize={shown(quantize)} is not foretold; known: {', '.join(BITS)}")
    checkpoint = open_checkpoint(folder)
    with quiet_transformers():
        config = checked_config(checkpoint)
        dtype, _ = run_dtype(checkpoint, "auto", torch.device("cpu"))
        model = described_model(checkpoint, config, dtype)
        tokenizer = load_tokenizer(checkpoint.path)
    family = FAMILIES[config.model_type]
    header = checkpoint.gguf
    formats: Counter[str] = Counter()
    if header is not None or checkpoint.packed is not None:
        refuse_absent_or_other(checkpoint, stored_as(model), bool(config.tie_word_embeddings))
    if quantize is not None:
        check_plain(checkpoint, quantize)
        formats = _rounded(model, quantize, dtype)
    elif checkpoint.packed is not None:
        formats.update(checkpoint.packed.nbytes)
    elif header is None:
        stored = str(checkpoint.stored_dtype).removeprefix("torch.")
        numbers = sum(one.numel() for one in checkpoint.shapes.values())
        formats[stored] = numbers * checkpoint.stored_dtype.itemsize
    else:
        for tensor in header.tensors:
            formats[tensor.kind] += tensor.nbytes
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelFacts(
        path=folder if header is None else header.path,
        family=config.model_type,
        architecture=None if header is None else header.architecture,
        parameters=sum(one.numel() for one in checkpoint.shapes.values()),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        context=max_position(config),
        windows=sum(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()),
        vocabulary=config.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        formats=dict(formats.most_common()),
        token_bytes=2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize,
        tokenizer=_kind(tokenizer.available, {} if header is None else header.metadata),
        chat_template=tokenizer.available and tokenizer.has_chat_template,
        own_loop=has_shape(family, config),
    )


def _rounded(model: Any, quantize: str, dtype: torch.dtype) -> Counter[str]:
    """Bytes of a model's weights by formats, once they are rounded."""
    formats: Counter[str] = Counter()
    for name, shape in stored_as(model).items():
        own, tied = name.removesuffix(".weight"), model.config.tie_word_embeddings
        if name == "lm_head.weight" and tied:
            continue
        bits = bits_of(own, shape[-1], quantize) if own != name and len(shape) > 1 else None
        if bits is None:
            formats[str(dtype).removeprefix("torch.")] += shape.numel() * dtype.itemsize
        else:
            formats[f"INT{bits}_{CHANNELS}"] += shape.numel() * bits // 8 + shape.numel() // CHANNELS * 3
    return formats


def _kind(available: bool, metadata: dict[str, Any]) -> str | None:
    if not available:
        return None
    kind = {"gpt2": "BPE over bytes", "llama": "SentencePiece"}.get(str(metadata.get("tokenizer.ggml.model")))
    rule = metadata.get("tokenizer.ggml.pre")
    return (kind or "transformers'") + (f", words cut as {rule}" if rule and kind == "BPE over bytes" else "")
