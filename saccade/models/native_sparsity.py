"""What a natively sparse checkpoint is, by its config alone: a part of the model chooses what its attention reads.

Such an indexer is trained with the model. A query's tokens beyond its choice take no part in the softmax, so dense
attention over all of them is another function, and so is any method's choice in place of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]


def _number(config: Config, name: str, default: int | None = None) -> int | None:
    value = config.get(name, default)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _counted(number: int | None) -> str:
    """Before a noun; nothing where the config does not say how many."""
    return "" if number is None else f"{number:,} "


def _tokens(config: Config, default: int | None = None) -> str | None:
    """DeepSeek Sparse Attention (DeepSeek-V3.2, 2025): an indexer scores every token, each query reads the best."""
    count = _number(config, "index_topk", default)
    if count is None:
        return None
    return f"DeepSeek Sparse Attention, by which every query reads the {count:,} tokens that an indexer scores highest"


def _pools(config: Config) -> str | None:
    """The same by groups of tokens whose index keys are pooled (GLM 5)."""
    said, pool = _tokens(config, 2048), _number(config, "index_kpool", 16)
    return said if said is None or pool is None else f"{said}, in pools of {pool:,}"


_INDEXED_RATIO = 4  # of former configs' compress_ratios, whose layers have an indexer


def _compressed(config: Config) -> str | None:
    """DeepSeek V4: windows beside tokens that a layer compresses, of which an indexer chooses in some layers."""
    kinds, ratios = config.get("layer_types"), config.get("compress_ratios")
    if isinstance(kinds, list):
        indexed = "compressed_sparse_attention" in kinds
    else:
        indexed = not isinstance(ratios, list) or _INDEXED_RATIO in ratios
    count = _number(config, "index_topk", 512)
    said = (
        "compressed sparse attention, by which a query reads a window and "
        f"the {_counted(count)}entries, each made of several tokens, that an indexer scores highest"
    )
    return said if indexed else None


def _blocks(config: Config) -> str | None:
    """MiniMax M3: an indexer's keys are scored by blocks in layers that ``layer_types`` calls minimax_m3_sparse."""
    given = config.get("sparse_attention_config")
    former: Config = given if isinstance(given, Mapping) else {}
    kinds = config.get("layer_types")
    if kinds is None and "sparse_attention_freq" in former:
        freq = former["sparse_attention_freq"]
        kinds = ["minimax_m3_sparse" if one else "full_attention" for one in freq] if isinstance(freq, list) else None
    if isinstance(kinds, list) and "minimax_m3_sparse" not in kinds:
        return None
    count = _number(config, "index_topk_blocks", _number(former, "sparse_topk_blocks", 16))
    size = _number(config, "index_block_size", _number(former, "sparse_block_size", 128))
    return (
        "MiniMax's sparse attention, by which every query reads the "
        f"{_counted(count)}blocks of {_counted(size)}tokens that an indexer scores highest"
    )


def _averages(config: Config) -> str | None:
    """Qwen4-Exp: an indexer scores averages of consecutive tokens' keys; without indexer_n_heads there is none."""
    if _number(config, "indexer_n_heads") is None:
        return None
    budget, size = _number(config, "indexer_budget"), _number(config, "indexer_compress_ratio")
    of = "" if size is None else f" in blocks of {size:,}"
    return f"QSA, by which every query reads the {_counted(budget)}tokens{of} that an indexer scores highest"


def _default_tokens(config: Config) -> str | None:
    return _tokens(config, 2048)


# By model_type, what says so, with the defaults of transformers' config for what config.json leaves out.
_KNOWN: dict[str, Callable[[Config], str | None]] = {
    "axk2": _default_tokens,
    "deepseek_v32": _default_tokens,
    "deepseek_v4": _compressed,
    "dots3_note_text": _default_tokens,
    "glm5_next_text": _pools,
    "glm_moe_dsa": _default_tokens,
    "hy_v4": _default_tokens,
    "minimax_m3": _blocks,
    "minimax_m3_vl_text": _blocks,
    "mistral_large4_text": _default_tokens,
    "qwen4_exp_text": _averages,
}
# Multimodal types, where config.json keeps the language model's fields under text_config, and its type there.
_AROUND = {
    "dots3_note": "dots3_note_text",
    "glm5_next": "glm5_next_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral_large4": "mistral_large4_text",
    "qwen4_exp": "qwen4_exp_text",
}


def native_sparsity(config: Config) -> str | None:
    """How the attention of a model with this config.json chooses what it reads, in words; None where it does not, or
    where that is not known of its ``model_type``. A field of DeepSeek's indexer counts in any type."""
    kind = str(config.get("model_type"))
    inner = config.get("text_config")
    if kind in _AROUND:
        kind, config = _AROUND[kind], inner if isinstance(inner, Mapping) else config
    return _KNOWN.get(kind, _tokens)(config)
