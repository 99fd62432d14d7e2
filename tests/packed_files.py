"""Checkpoints of quantised weights, packed in numpy as their formats define it, and what their weights are worth."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7
FOLDERS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq_sym": {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "checkpoint_format": "gptq"},
    "gptq_8": {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False},
    "gptq_act": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
}


def _compressed(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers.0.mlp.down_proj"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_ROWS = {"num_bits": 8, "dynamic": True, "strategy": "token"}
FOLDERS |= {
    "w4a16": _compressed("pack-quantized", _INT4),
    "w4a16_asym": _compressed("pack-quantized", {**_INT4, "symmetric": False}),
    "w8a16": _compressed("pack-quantized", _INT8),
    "w8a8": _compressed("int-quantized", _INT8, input_activations={**_ROWS, "type": "int"}),
    "fp8_dynamic": _compressed("float-quantized", _FP8, input_activations={**_ROWS, "type": "float"}),
    "fp8_static": _compressed("float-quantized", {**_FP8, "strategy": "tensor"}),
    "fp8_blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 48], "activation_scheme": "dynamic"},
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
}


def packed(fields: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words of ``fields``, 32 / bits along ``axis`` a word, from the lowest bits on."""
    each = 32 // bits
    moved = np.moveaxis(fields.astype(np.uint32), axis, -1)
    moved = np.pad(moved, [(0, 0), (0, -moved.shape[-1] % each)]).reshape(len(moved), -1, each)
    words = np.zeros(moved.shape[:-1], np.uint32)
    for place, field in enumerate(order or range(each)):
        words |= moved[..., field] << np.uint32(place * bits)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def integers(values: np.ndarray, bits: int, which: np.ndarray, symmetric: bool, kind: torch.dtype):
    """Round to nearest by groups ``which`` [channels]: codes, scales of ``kind``, zeros, and values in float32."""
    count, most = int(which.max()) + 1, (1 << bits) - 1
    low = np.stack([values[:, which == one].min(1) for one in range(count)], 1).clip(max=0)
    high = np.stack([values[:, which == one].max(1) for one in range(count)], 1).clip(min=0)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    scales = torch.from_numpy((high - low) / most + 1e-6).to(kind)
    wide = scales.double().numpy()
    zeros = np.full(wide.shape, (most + 1) // 2) if symmetric else (-low / wide).round().clip(1, most)
    codes = (values / wide[:, which] + zeros[:, which]).round().clip(0, most)
    return codes.astype(np.int64), scales, zeros.astype(np.int64), wide[:, which] * (codes - zeros[:, which])


def matrix(config: dict[str, Any], values: np.ndarray, kind: torch.dtype, rng: np.random.Generator):
    """The tensors of a matrix [outputs, channels], by suffixes, and what they are worth, in float64."""
    method, (outputs, channels) = config["quant_method"], values.shape
    if method in ("awq", "gptq"):
        bits, size = config["bits"], channels if config["group_size"] == -1 else config["group_size"]
        which = np.arange(channels) // size
        if config.get("desc_act"):
            which = rng.permutation(which)
        codes, scales, zeros, worth = integers(values, bits, which, config.get("sym", False), torch.float16)
        if method == "awq":
            fields = {"qweight": packed(codes.T, 4, 1, AWQ_ORDER), "qzeros": packed(zeros.T, 4, 1, AWQ_ORDER)}
        else:
            zeros = zeros - (config.get("checkpoint_format", "gptq") == "gptq")
            fields = {"qweight": packed(codes.T, bits, 0), "qzeros": packed(zeros.T, bits, 1)}
            fields["g_idx"] = torch.from_numpy(which.astype(np.int32))
        return {**fields, "scales": scales.T.contiguous()}, worth
    if method == "compressed-tensors":
        weights = config["config_groups"]["group_0"]["weights"]
        if weights["type"] == "float":
            return floats(values, (1, channels) if weights["strategy"] == "channel" else (outputs, channels), kind)
        bits = weights["num_bits"]
        which = np.arange(channels) // (weights.get("group_size") or channels)
        codes, scales, zeros, worth = integers(values, bits, which, weights["symmetric"], kind)
        if config["format"] == "int-quantized":
            return {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": scales}, worth
        made = {"weight_packed": packed(codes, bits, 1), "weight_scale": scales}
        made["weight_shape"] = torch.tensor(values.shape)
        if not weights["symmetric"]:
            made["weight_zero_point"] = packed(zeros, bits, 0)
        return made, worth
    made, worth = floats(values, tuple(config.get("weight_block_size") or (1, channels)), torch.float32)
    return ({"weight_scale_inv": made.pop("weight_scale"), **made} if method == "fp8" else made), worth


def floats(values: np.ndarray, block: tuple[int, int], kind: torch.dtype):
    """e4m3 with a scale of ``kind`` for each block."""
    outputs, channels = values.shape
    down, across = np.arange(outputs) // block[0], np.arange(channels) // block[1]
    most = np.zeros((down[-1] + 1, across[-1] + 1))
    np.maximum.at(most, (down[:, None], across[None, :]), abs(values))
    scales = torch.from_numpy(most / 448 + 1e-9).to(kind)
    spread = scales.double().numpy()[down][:, across]
    weight = torch.from_numpy(values / spread).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    worth = weight.double().numpy() * spread
    return {"weight": weight, "weight_scale": scales[0] if scales.numel() == 1 else scales}, worth


def small_floats(values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """MXFP4 of ``values`` [experts, outputs, channels]: 32 numbers behind a power of two."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    apart = values.reshape(*values.shape[:2], -1, 32)
    powers = np.floor(np.log2(abs(apart).max(-1) + 1e-30)).astype(int) - 2
    codes = abs(apart[..., None] / 2.0 ** powers[..., None, None] - table).argmin(-1)
    worth = (table[codes] * 2.0 ** powers[..., None]).reshape(values.shape)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy((powers + 127).astype(np.uint8))}, worth


def quantise(made: Path, folder: Path, config: dict[str, Any], seed: int = 0) -> tuple[Path, Any]:
    """The checkpoint ``made`` with ``config`` and its layers' products quantised so, and transformers' model in float32
    of what they are worth. What the config leaves out stays as it is."""
    shutil.copytree(made, folder)
    stored: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
        file.unlink()
    for index in folder.glob("*.index.json"):
        index.unlink()
    left = [
        one.removeprefix("re:") for one in config.get("ignore") or config.get("modules_to_not_convert") or ["lm_head"]
    ]
    worth, rng = dict(stored), np.random.default_rng(seed)
    kept: Tensors = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if config["quant_method"] == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, values = small_floats(tensor.transpose(1, 2).double().numpy())
            kept |= {f"{name}_{part}": one.contiguous() for part, one in parts.items()}
            worth[name] = torch.from_numpy(values).float().transpose(1, 2)
            continue
        if (
            not re.search(r"\.(\w+_proj|w[123])\.weight$", name)
            or config["quant_method"] == "mxfp4"
            or any(re.match(one, module) for one in left)
        ):
            kept[name] = tensor
            continue
        kind = torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float16
        parts, values = matrix(config, tensor.double().numpy(), kind, rng)
        kept |= {f"{module}.{part}": one.contiguous() for part, one in parts.items()}
        worth[name] = torch.from_numpy(values).float()
    theirs = _model(made, folder.parent / f"{folder.name}-worth", worth)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "quantization_config": config}))
    return folder, theirs


def _model(made: Path, folder: Path, worth: Tensors) -> Any:
    folder.mkdir()
    shutil.copy(made / "config.json", folder)
    save_file(
        {name: one.float().contiguous() for name, one in worth.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
