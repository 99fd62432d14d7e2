"""Every model of transformers that generates text, small, and what it shows of itself: evidence for reasons."""

from __future__ import annotations

import inspect
import json
import re
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_SMALL = {
    "vocab_size": 300, "hidden_size": 64, "d_model": 64, "n_embd": 64, "intermediate_size": 64, "ffn_dim": 64,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "n_positions": 128, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}  # fmt: skip
_STATES = re.compile(
    r"mamba|ssm|delta|shortconv|conv1d|recurrent|lstm|rwkv|linearattention|lightning|kda|cca|shortconvolution", re.I
)


def small_config(model_type: str) -> dict[str, Any]:
    """config.json of a small model, or of the default one where its class takes no such sizes."""
    kind = CONFIG_MAPPING[model_type]
    try:
        known = kind().to_dict().keys()
        heads = {"num_key_value_heads": 4} if "kv_lora_rank" in known else {}  # which hold all heads' keys and values
        config = kind(**{name: size for name, size in (_SMALL | heads).items() if name in known})
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(deepcopy(config))  # which may change what it is given
    except Exception:
        try:
            config = kind()
        except Exception:  # one whose defaults do not fit each other
            return {"model_type": model_type}
    return {**json.loads(config.to_json_string(use_diff=False)), "model_type": model_type}


class Evidence:
    """What transformers' model of a config.json shows."""

    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.config = CONFIG_MAPPING[raw["model_type"]].from_pretrained(folder)
        self.text = self.config.get_text_config(decoder=True)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(deepcopy(self.config), dtype=torch.float32)

    @classmethod
    def of(cls, folder: Path) -> Evidence | None:
        """None where transformers itself makes no model of it."""
        try:
            return cls(folder)
        except Exception:
            return None

    def keeps_state(self) -> bool:
        kinds = {type(one).__name__ for one in self.model.modules()} - {"Conv1D"}  # GPT-2's name of a product
        text = {kind for kind in kinds if not re.search(r"vision|audio|image", kind, re.IGNORECASE)}
        return bool(getattr(self.model, "_is_stateful", False)) or any(_STATES.search(kind) for kind in text)

    def latent(self) -> bool:
        names = " ".join(name for name, _ in self.model.named_modules())
        return bool(re.search(r"kv_a_proj|kv_lora|kv_b_proj", names))

    def shares_keys(self) -> bool:
        return bool(getattr(self.text, "num_kv_shared_layers", 0))

    def parts(self) -> list[str]:
        return [name for name, one in vars(self.config).items() if isinstance(one, PreTrainedConfig)]

    def source(self) -> str:
        return inspect.getsource(sys.modules[type(self.model).__module__])

    def sees_ahead(self) -> bool:
        """Whether a later token changes what is said of an earlier one."""
        if sum(one.numel() for one in self.model.parameters()) > 5 * 10**6:
            return not getattr(self.config, "is_decoder", True) or "xlm" in type(self.model).__name__.lower()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(self.config), dtype=torch.float32).eval()
        if hasattr(model, "set_default_language"):  # XMOD has parts for each
            model.set_default_language(self.config.languages[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.2)
            ids = torch.arange(5, 69)[None]
            other = ids.clone()
            other[0, -1] = 77
            first, second = (model(input_ids=one, use_cache=False).logits[0, 0] for one in (ids, other))
        return not torch.allclose(first, second, atol=1e-4)
