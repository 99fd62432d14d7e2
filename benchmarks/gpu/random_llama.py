"""Llamas of random weights, of any shape and of the 8B one, and their weights in the formats of quantised checkpoints.

Attention over random weights is nearly uniform: nothing here says anything about answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tiles import drawn
from transformers import AutoModelForCausalLM, LlamaConfig

from saccade.models import attention
from saccade.models.interface import ModelSpec
from saccade.models.llama_weights import NamedTensors, Use
from saccade.ops.block_weights import FORMATS as BLOCKS
from saccade.ops.group_rounding import BITS, rounded_matrix
from saccade.ops.matrices import Matrix
from saccade.ops.planes import packed


def random_llama(
    *,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_position: int,
    **options: Any,
) -> tuple[Any, ModelSpec]:
    """A model in bfloat16 on the GPU, by transformers' modules, and its shape. ``options``: more of its config."""
    attention.register()
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        **options,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention.ATTENTION_NAME
        )
    spec = ModelSpec(
        family="llama",
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position=max_position,
        dtype=torch.bfloat16,
        windows=(None,) * layers,
    )
    return model.eval().requires_grad_(False), spec


def random_8b(layers: int, max_position: int) -> tuple[Any, ModelSpec]:
    """A model of Llama 3.1's 8B shape; of its 32 layers so many."""
    return random_llama(
        layers=layers,
        hidden=4096,
        inner=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position=max_position,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


class Packed(NamedTensors):
    """Matrices in integers of ``quantize`` bits, or in random blocks of that format; the head in 8 bits or Q6_K."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], quantize: str) -> None:
        super().__init__(tensors)
        self._quantize = quantize

    def matrix(self, name: str, bias: bool = False, use: Use = "matrix") -> Matrix:
        plain, head = super().matrix(name, bias, use), name == "lm_head"
        if use == "table":
            return plain
        if self._quantize in BLOCKS:
            return drawn("Q6_K" if head else self._quantize, plain.outputs, plain.channels)
        return packed(rounded_matrix(plain.weight, 8 if head else BITS[self._quantize]))
