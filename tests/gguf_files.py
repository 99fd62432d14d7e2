"""GGUF files of tiny checkpoints, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tiny_models import CHAT_TEMPLATE, make_checkpoint
from tokenizers import pre_tokenizers

from saccade.models.gguf_names import FAMILIES, MODEL_TYPES

# Rows are whole blocks of 32 weights, as quantised types want them.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 272}
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
TOKENS += ["ĠĠ", "<bos>", "<eos>", "<user>", "<assistant>", *(f"[PAD{at}]" for at in range(11))]
BOS, EOS = 257, 258


def tiny(kind: str, folder: Path, **overrides: Any) -> Path:
    """A float32 checkpoint of the architecture ``kind`` (as GGUF names it)."""
    plain = {"attention_bias": False, "use_sliding_window": False} if kind != "gemma3" else {}
    plain |= {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    if kind == "gemma3":
        layers = ["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(6)]
        local = {"rope_type": "default", "rope_theta": 10000.0}
        plain = {
            "num_hidden_layers": 6, "layer_types": layers, "sliding_window": 7, "query_pre_attn_scalar": 16,
            "rope_parameters": {"sliding_attention": local, "full_attention": {**local, "rope_theta": 1e6}},
            "final_logit_softcapping": None,
        }  # fmt: skip
    family = MODEL_TYPES.get(kind, kind)
    settings = {**plain, **SIZES, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": None, **overrides}
    return make_checkpoint(family, folder, tokenizer=False, **settings)


def write(
    checkpoint: Path,
    file: Path,
    kind: str,
    stored: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "default",
    without: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    others: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    **metadata: Any,
) -> Path:
    """``checkpoint`` as a GGUF file, matrices as ``stored``. ``without``: keys and tensors that are left out;
    ``extra``: more tensors, in float32; ``others``: types of
    matrices by parts of their names; ``metadata``: more keys of the architecture, ``__`` for a dot."""
    config = json.loads((checkpoint / "config.json").read_text())
    out = gguf.GGUFWriter(file, kind)
    said: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if kind == "gemma3":
        said["attention.sliding_window"] = config["sliding_window"]
        said["rope.freq_base"] = config["rope_parameters"]["full_attention"]["rope_theta"]
    else:
        said["rope.freq_base"] = config["rope_parameters"]["rope_theta"]
    said |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in said.items():
        if key not in without:
            add = {float: out.add_float32, int: out.add_uint32, str: out.add_string}[type(value)]
            add(f"{kind}.{key}", value)
    if "tokenizer" not in without:
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre(pre)
        out.add_token_list(TOKENS)
        out.add_token_types([3 if token in TOKENS[257:261] else 5 if "PAD" in token else 1 for token in TOKENS])
        out.add_token_merges(["Ġ Ġ", "Ġ Ġ"])  # of one alone some versions of transformers make a text
        out.add_bos_token_id(BOS)
        out.add_eos_token_id(EOS)
        out.add_chat_template(CHAT_TEMPLATE)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    names = {theirs: ours for ours, theirs in FAMILIES[kind].items()}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        *layer, part = stem.removeprefix("model.layers.").split(".", 1) if "layers." in stem else (stem,)
        named = ".".join([*(f"blk.{at}" for at in layer), names[part], suffix])
        if named in without:
            continue
        if kind == "llama" and (".attn_q." in named or ".attn_k." in named):
            weight = interleaved(weight, heads if ".attn_q." in named else kv_heads)
        if kind == "gemma3" and named.endswith("norm.weight"):
            weight = weight + 1
        own = next((kind for part, kind in (others or {}).items() if part in named.split(".")), stored)
        as_stored = own if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        out.add_tensor(named, gguf.quantize(weight.numpy(), as_stored), raw_dtype=as_stored)
    for name, values in (extra or {}).items():
        out.add_tensor(name, values.astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in the order that ggml rotates: first of the lower half, first of the upper half, and so on."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()
