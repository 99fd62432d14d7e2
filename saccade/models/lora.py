"""A LoRA adapter in peft's format, added to the weights of its base model as they load (Hu et al. 2021, LoRA, section
4.1: W + s B A; with DoRA's magnitudes, Liu et al. 2024, equation 5)."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from saccade.errors import ModelError, finite_number, shown, whole_number
from saccade.models.checkpoint import Checkpoint, first_line
from saccade.models.dense_weights import SafetensorsWeights
from saccade.models.identity import joined_digest, tensor_digest
from saccade.models.text_part import WRAPPERS, own_name

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge it with peft (merge_and_unload, save_pretrained), and give the merged folder"
_PARTS = {
    "lora_A.weight": "low",
    "lora_B.weight": "high",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
# Fields that are read, or that matter to training alone; any other that is switched on changes what is computed.
_READ = "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias", "peft_type"
_OF_TRAINING = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "target_modules", "task_type", "velora_config",
)  # fmt: skip
# Ways to begin that leave the base as it is; others take a part of it away, which a saved adapter does not say.
_INITS = True, False, None, "gaussian", "eva", "orthogonal"


@dataclass(frozen=True, eq=False)
class Pair:
    """What is added to a matrix [outputs, channels]: ``scale`` times ``high`` [outputs, r] by ``low`` [r, channels].
    ``magnitude`` [outputs]: what the norm of each of its rows then is (DoRA)."""

    low: Tensor
    high: Tensor
    scale: float
    magnitude: Tensor | None

    def added(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """``weight`` with it, summed in float32 and rounded once to ``dtype``."""
        made = weight.to(torch.float32, copy=True)
        low, high = (one.to(weight.device, torch.float32) for one in (self.low, self.high))
        made.addmm_(high, low, alpha=self.scale)
        if self.magnitude is not None:
            made *= (self.magnitude.to(weight.device, torch.float32).view(-1) / made.norm(dim=1))[:, None]
        return made.to(dtype)


@dataclass(frozen=True)
class Adapter:
    """``pairs`` by the names of the base model's matrices, as it calls them alone (``models.text_part``)."""

    path: Path
    pairs: dict[str, Pair]

    @property
    def name(self) -> str:
        """For people: its folder, and a digest of what it adds."""
        parts = {
            f"{name}.{part}": tensor_digest(tensor) + f" {pair.scale!r}"
            for name, pair in self.pairs.items()
            for part, tensor in (("low", pair.low), ("high", pair.high), ("magnitude", pair.magnitude))
            if tensor is not None
        }
        return f"{self.path.name} ({joined_digest(parts)[:8]})"

    def add_to(self, model: Any) -> None:
        """Add it to the weights of transformers' modules, in place."""
        with torch.no_grad():
            for name, pair in self.pairs.items():
                weight = model.get_submodule(name).weight
                weight.copy_(pair.added(weight, weight.dtype))


class AdaptedWeights(SafetensorsWeights):
    """As :class:`SafetensorsWeights`, with ``adapter`` added."""

    def __init__(self, adapter: Adapter, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._adapter = adapter

    def whole(self, name: str) -> Tensor:
        """See :class:`SafetensorsWeights`; a tensor that something is added to is in the type that runs."""
        held = super().whole(name)
        pair = self._adapter.pairs.get(name.removesuffix(".weight"))
        if pair is None:
            return held
        made = pair.added(held, self._dtype)
        self.read(held)
        return made


def open_adapter(folder: str | Path, checkpoint: Checkpoint, model: Any) -> Adapter:
    """The adapter in ``folder`` for the model of ``checkpoint``, whose modules are ``model``'s and may hold nothing.
    ModelError for one that is broken, of another kind, or of another model."""
    path = Path(folder).expanduser()
    config = _config(path)
    refused = _not_read(config)
    if refused is not None:
        raise ModelError(f"lora={str(path)!r}: {refused}; {MERGE}")
    if checkpoint.gguf is not None or checkpoint.packed is not None:
        raise ModelError(
            f"lora={str(path)!r} is added to weights of 16 or 32 bits, but those of {checkpoint.path} are quantised; "
            "give the unquantised model, with quantize='int4' or 'int8' to have the sum rounded as it loads"
        )
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except Exception as error:  # safetensors raises its own type, OSError or ValueError
        raise ModelError(f"{path / WEIGHTS} cannot be read: {first_line(error)}; give the whole adapter") from error
    pairs = _pairs(path, config, tensors)
    _check_places(path, pairs, checkpoint, model)
    return Adapter(path, pairs)


def _config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    if not file.is_file():
        raise ModelError(f"lora={str(path)!r} holds no {CONFIG}; give the folder of an adapter that peft saved")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object")
    if not (path / WEIGHTS).is_file():
        raise ModelError(f"lora={str(path)!r} holds no {WEIGHTS}; only safetensors are read: save the adapter as such")
    return config


def _not_read(config: Mapping[str, Any]) -> str | None:
    """What of an adapter's config is no plain LoRA; None where it is."""
    kind = config.get("peft_type")
    if kind != "LORA":
        return f"peft_type={shown(kind, 40)} is not LORA"
    if config.get("bias", "none") != "none":
        return f"bias={shown(config['bias'], 40)} changes biases, too"
    begun = config.get("init_lora_weights", True)
    if not isinstance(begun, (bool, str, type(None))) or begun not in _INITS:
        return f"init_lora_weights={shown(begun, 40)} takes a part of the base model away, which the adapter lacks"
    if not whole_number(config.get("r"), 1) or not finite_number(config.get("lora_alpha")):
        return f"r={shown(config.get('r'), 40)} or lora_alpha={shown(config.get('lora_alpha'), 40)} is no number"
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            return f"{name}={shown(config[name], 40)} is no object"
    other = next((name for name in config if name not in (*_READ, *_OF_TRAINING) and config[name]), None)
    return None if other is None else f"{other}={shown(config[other], 60)} is not read"


def _pairs(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    found: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, part = next(
            ((name.removesuffix(f".{end}"), part) for end, part in _PARTS.items() if name.endswith(f".{end}")), ("", "")
        )
        if not part or not module.startswith("base_model.model."):
            whole = (
                "an embedding of its own" if "lora_embedding" in name else "a whole tensor, or a part of another kind"
            )
            raise ModelError(f"lora={str(path)!r} holds {whole} ({shown(name, 100)}), which is not read; {MERGE}")
        found[module.removeprefix("base_model.model.")][part] = tensor
    pairs: dict[str, Pair] = {}
    for module, parts in found.items():
        rank = _of_pattern(config, "rank_pattern", module, config["r"])
        alpha = _of_pattern(config, "alpha_pattern", module, config["lora_alpha"])
        if not finite_number(alpha) or not whole_number(rank, 1):
            raise ModelError(f"lora={str(path)!r}: rank {shown(rank, 40)} or alpha {shown(alpha, 40)} is no number")
        low, high, magnitude = (parts.get(part) for part in ("low", "high", "magnitude"))
        if low is None or high is None or (magnitude is None) is bool(config.get("use_dora")):
            raise ModelError(f"lora={str(path)!r}: a part of {module} is missing or too much; give the whole adapter")
        if low.dim() != 2 or high.dim() != 2 or not low.shape[0] == high.shape[1] == rank:
            raise ModelError(
                f"lora={str(path)!r}: {module} is {list(high.shape)} by {list(low.shape)}, not of rank {rank}, as its "
                f"{CONFIG} says; give the files that belong together"
            )
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        pairs[own_name(module)] = Pair(low, high, scale, magnitude)
    return pairs


def _of_pattern(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """What a field gives for a module by its regular expressions, the first that matches, as peft looks it up."""
    for pattern, value in (config.get(field) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error:
            continue
    return default


def _check_places(path: Path, pairs: dict[str, Pair], checkpoint: Checkpoint, model: Any) -> None:
    """ModelError for a pair without its matrix; pairs of a multimodal model's other parts are dropped."""
    matrices = {name: one.weight.shape for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    if checkpoint.whole["model_type"] in WRAPPERS:
        for name in [name for name in pairs if not name.startswith(("model.layers.", "lm_head"))]:
            del pairs[name]
    if not pairs:
        raise ModelError(f"lora={str(path)!r} changes nothing of the language model; leave it out")
    if model.config.tie_word_embeddings and "lm_head" in pairs:
        raise ModelError(f"lora={str(path)!r} changes lm_head, which is the embedding, too, in this model; {MERGE}")
    for name, pair in pairs.items():
        shape = (pair.high.shape[0], pair.low.shape[1])
        if name not in matrices:
            raise ModelError(
                f"lora={str(path)!r} changes {shown(name, 100)}, which {checkpoint.path} has no matrix "
                f"of{_experts(name)}; give the adapter's base model, or {MERGE}"
            )
        outputs = shape[0] if pair.magnitude is None else pair.magnitude.numel()
        if shape != tuple(matrices[name]) or outputs != shape[0]:
            raise ModelError(
                f"lora={str(path)!r}: {name} is {list(shape)}, but {list(matrices[name])} in {checkpoint.path}; give "
                "the adapter's base model"
            )


def _experts(name: str) -> str:
    return " by itself (experts lie together)" if ".experts." in name else ""
