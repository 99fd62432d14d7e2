"""Tiny random checkpoints made on the spot, one per supported family, and the oracle to hold them against.

Weights are drawn large enough that attention decides the output (the default initialisation would let a broken cache
pass), norms and biases are random too, and windows are shorter than the prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

hf_logging.disable_progress_bar()

BOS, EOS, PAD = 256, 257, 258
SPECIALS = ("<bos>", "<eos>", "<pad>", "<user>", "<assistant>")
VOCAB = 288  # larger than the tokenizer, as real checkpoints are padded
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

_DELTA = {  # three heads of values to one of keys
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_PARTIAL = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}

_LATENT = {  # rows of 48 channels, whole vectors, of which 32 are values; heads of 28, with values of 20
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "attention_bias": True,
}
_GROUPS = {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

REQUIRED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe", "glm4", "smollm3", "granite")

# What each family sets beyond the base, chosen so that every per-family step changes the logits.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "head_dim": 16},  # whole vectors, which the C++ kernels serve
    "mistral": {"sliding_window": 7, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "phi3": {"sliding_window": 9},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16, "norm_topk_prob": True, **_MOE},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
    },
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 7,
        "layer_types": _ALTERNATE,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 7,
        "layer_types": _ALTERNATE,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
        "final_logit_softcapping": 5.0,
    },
    "gemma4_text": {  # the last three layers store no keys
        "num_hidden_layers": 7,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 3,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", *_ALTERNATE, "sliding_attention", "full_attention"],
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 5.0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma3n_text": {  # the last three layers store no keys
        "head_dim": 16,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "sliding_window": 7,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "final_logit_softcapping": 5.0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 3,
        "altup_active_idx": 1,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.7, 0.0, 0.0],
    },
    "phi": {"partial_rotary_factor": 0.5},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "layer_types": _ALTERNATE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.3, "sliding_window": 7, "layer_types": _ALTERNATE},
    "olmo2": {},
    "olmo3": {"sliding_window": 7, "layer_types": _ALTERNATE},
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        **_MOE,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
    },
    "ministral": {"head_dim": 16, "sliding_window": 7, "layer_types": _ALTERNATE},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "arcee": {},
    "cwm": {"head_dim": 16, "sliding_window": 7, "layer_types": _ALTERNATE},
    "ernie4_5": {"head_dim": 16},
    "exaone4": {"sliding_window": 7, "layer_types": _ALTERNATE},
    "glm": {"head_dim": 16},
    "olmo": {"clip_qkv": 1.0},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, **_MOE},
    "seed_oss": {"head_dim": 16},
    "starcoder2": {"sliding_window": 7},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 4,
        "num_dense_layers": 1,
        "use_expert_bias": True,
        **_MOE,
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
        "position_embedding_type": "rope",
        **_MAMBA,
    },
    "falcon_h1": {
        "mamba_d_ssm": 96,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "key_multiplier": 0.5,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 0.7,
        "ssm_multipliers": [0.9, 0.8, 1.1, 0.7, 1.2],
        **_MAMBA,
    },
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "nemotron_h": {
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 24,
        "routed_scaling_factor": 1.5,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
        **_DELTA,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **_MOE,
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1, **_LATENT, **_GROUPS, **_MOE},
    "deepseek_v3": {"first_k_dense_replace": 1, "rope_parameters": _YARN, **_LATENT, **_GROUPS, **_MOE},
    "glm4_moe_lite": {**_LATENT, **_GROUPS, **_MOE},
    "youtu": _LATENT,
    "qwen3_5_text": {"rope_parameters": _PARTIAL, **_DELTA},
    "qwen3_5_moe_text": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": _PARTIAL,
        **_DELTA,
        **_MOE,
    },
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Imported by test modules: these matrices are too small to share between threads that others may hold up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_checkpoint(family: str, folder: Path, *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> Path:
    """Write a random float32 checkpoint of ``family`` into ``folder`` (created) and return the folder."""
    settings = {**_BASE, **CONFIGS[family], **overrides}
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms, biases, sinks
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.5 if "embed" in name else 0.2))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: ids 0-255 are bytes, then the specials; adds <bos> by default; has a chat template."""
    from tokenizers.processors import TemplateProcessing

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    core.post_processor = TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The same checkpoint as transformers itself runs it, with eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def oracle_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab] float32 logits of ``model.forward`` for one sequence."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


@torch.inference_mode()
def oracle_greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """The greedy continuation ``model.generate`` gives for one sequence, up to ``count`` tokens or end of sequence."""
    prompt = torch.tensor([list(ids)])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=PAD
    )
    return out[0, len(ids) :].tolist()


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json in place (a value of None writes null)."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps(config))
    return folder


def random_ids(length: int, seed: int) -> list[int]:
    """Seeded byte tokens."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
