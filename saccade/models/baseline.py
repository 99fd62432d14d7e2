"""What benchmarks need of transformers: a random model of a common shape, and its own way to tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.streamers import BaseStreamer

from saccade.errors import ModelError
from saccade.models.checkpoint import Checkpoint, open_checkpoint
from saccade.models.quiet import quiet_transformers
from saccade.models.rebuilt import cache_argument
from saccade.models.reference import codes
from saccade.models.reference.tokenizer import build_tokenizer
from saccade.models.text_part import WRAPPERS

RANDOM_LLAMA = {  # 129 million parameters, the head shared with the embedding
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
RANDOM_8B = {  # 8 billion parameters with its 32 layers, a head of its own
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def save_random_llama(path: str | Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Llama (``RANDOM_LLAMA`` with ``overrides``) with a byte tokenizer into the folder ``path``.

    Its weights are as transformers draws them, so its attention is flat: it shows what a step costs, never what a
    method finds.
    """
    folder = Path(path)
    settings = {**RANDOM_LLAMA, "bos_token_id": codes.BOS, "eos_token_id": codes.EOS, **overrides}
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**settings))
        model.to(dtype)
        model.generation_config = GenerationConfig(bos_token_id=codes.BOS, eos_token_id=codes.EOS, do_sample=False)
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    return folder


def refused_by_transformers(checkpoint: Checkpoint) -> str | None:
    """Why transformers is no peer for a checkpoint, and what to give instead; None where it runs it as it is stored."""
    if checkpoint.gguf is not None:
        return (
            f"transformers does not run the blocks of {checkpoint.gguf.path}; give a folder of safetensors to compare"
        )
    if checkpoint.packed is not None:
        return (
            f"{checkpoint.path} is in {checkpoint.packed.names}, which transformers runs by other packages; give the "
            "unquantised checkpoint to compare"
        )
    return None


class TransformersModel:
    """A checkpoint as transformers runs it by default, on ``device``."""

    def __init__(self, path: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> None:
        checkpoint = open_checkpoint(path)
        if why_not := refused_by_transformers(checkpoint):
            raise ModelError(why_not)
        folder = checkpoint.path
        with quiet_transformers():
            kind = AutoModelForMultimodalLM if checkpoint.whole["model_type"] in WRAPPERS else AutoModelForCausalLM
            self.model = kind.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        self.model.to(device)

    @property
    def attention(self) -> str:
        """The attention implementation that it chose."""
        return str(self.model.config._attn_implementation)

    @torch.inference_mode()
    def first_token(self, ids: list[int]) -> int:
        """The greedy next token, by ``generate``."""
        prompt = torch.tensor([ids], device=self.model.device)
        mask = torch.ones_like(prompt)
        out = self.model.generate(prompt, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)
        return int(out[0, -1])

    @torch.inference_mode()
    def generate(
        self,
        ids: list[int],
        tokens: int,
        *,
        past: Sequence[tuple[Tensor, Tensor]] | None = None,
        each: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """``tokens`` greedy tokens after ``ids``, by ``generate`` with its default cache; ``each`` is called when one
        is known. ``past``: every layer's keys and values [kv_heads, n, head_dim] of the first n < len(ids) tokens."""
        prompt = torch.tensor([ids], device=self.model.device)
        cache = DynamicCache(config=self.model.config)
        for layer, (k, v) in enumerate(past or ()):
            cache.update(k[None], v[None], layer)
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{cache_argument(self.model.forward): cache},
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=_Each(each),
        )
        return out[0, len(ids) :].tolist()

    def close(self) -> None:
        """Give its memory back."""
        del self.model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Each(BaseStreamer):
    """Calls a function for every token that ``generate`` hands out; the first thing it hands out is the prompt."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.begun = False

    def put(self, value: Tensor) -> None:
        if self.begun:
            self.call()
        self.begun = True

    def end(self) -> None:
        pass
