"""Writes trained weights as a Hugging Face checkpoint that loads anywhere without code of ours."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig

from saccade.models.reference import vocabulary as v
from train.model import Shape
from train.tokenizer import build_tokenizer


def export(weights: dict[str, Tensor], shape: Shape, folder: Path) -> None:
    """config.json, generation_config.json, model.safetensors in bfloat16, and the tokenizer with its chat template."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        rms_norm_eps=shape.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=True,
        bos_token_id=v.BOS,
        eos_token_id=v.END,
        pad_token_id=v.PAD,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    write(weights, config, folder)


def write(weights: dict[str, Tensor], config: PretrainedConfig, folder: Path) -> None:
    """The files of :func:`export`, under ``config``."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=v.BOS, eos_token_id=v.END, pad_token_id=v.PAD, do_sample=False).save_pretrained(
        folder
    )
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save_pretrained(folder)
