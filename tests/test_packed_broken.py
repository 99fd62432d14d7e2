"""Quantised checkpoints that are broken or lie, and methods that are not read: a ModelError of one line, from headers
and config alone but where only the numbers show it."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_files import FOLDERS, quantise
from safetensors.torch import load_file, save_file
from test_packed_weights import SIZES
from tiny_models import edit_config, make_checkpoint, one_thread  # noqa: F401

from saccade.errors import ModelError
from saccade.models.checkpoint import open_checkpoint
from saccade.models.loader import load_model
from saccade.models.packed_config import READERS, scheme_of
from saccade.models.packed_format import PackedError

MODULE = "model.layers.1.self_attn.k_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Callable[[str], Path]:
    """A good checkpoint in a format, made once."""
    made = make_checkpoint("llama", tmp_path_factory.mktemp("made") / "llama", **SIZES)
    folders: dict[str, Path] = {"plain": made}

    def of(name: str) -> Path:
        if name not in folders:
            folders[name] = quantise(made, tmp_path_factory.mktemp("packed") / name, FOLDERS[name])[0]
        return folders[name]

    return of


def refused(load: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def changed(folder: Path, tmp_path: Path, change: Callable[[Tensors], Any]) -> Path:
    copy = Path(shutil.copytree(folder, tmp_path / "changed"))
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def put(part: str, tensor: torch.Tensor | None) -> Callable[[Tensors], Any]:
    """Another tensor for a part of the module, or none."""
    name = f"{MODULE}.{part}"
    return lambda tensors: tensors.pop(name) if tensor is None else tensors.update({name: tensor})


HEADERS = [
    ("awq", put("scales", None), "scales is missing of a matrix in AWQ; download"),
    ("awq", put("qzeros", None), "qzeros is missing"),
    ("awq", put("qweight", None), "qzeros is stored as I32, of which its quantization_config says nothing"),
    ("awq", put("scales", torch.ones(2, 24).half()), "scales is F16 [2, 24], not F16 or BF16 or F32 [2, 32]"),
    ("awq", put("scales", torch.ones(2, 32).int()), "scales is I32"),
    ("awq", put("qzeros", torch.ones(1, 4).int()), "qzeros is I32 [1, 4], not I32 [2, 4]"),
    ("awq", put("qweight", torch.ones(64).int()), "not I32 of two dimensions"),
    ("awq", put("qweight", torch.ones(0, 4).int()), "not I32 of two dimensions"),
    ("awq", put("odd", torch.ones(3).int()), "odd is stored as I32"),
    ("awq", put("odd", torch.ones(3)), "no place in the model"),
    ("gptq", put("g_idx", torch.zeros(63).int()), "g_idx is I32 [63], not I32 [64]"),
    ("gptq", put("qweight", torch.ones(4, 32).int()), "qzeros is I32"),
    ("w4a16_asym", put("weight_zero_point", None), "weight_zero_point is missing"),
    ("w4a16", put("weight_scale", None), "weight_scale is missing"),
    ("w4a16", put("weight_packed", torch.ones(32, 16).int()), "weight_scale is F16 [32, 2], not"),
    ("w8a8", put("weight_scale", torch.ones(32, 3).half()), "weight_scale is F16 [32, 3], not"),
    ("w8a8", put("weight", torch.ones(32, 63).to(torch.int8)), "63 channels are no multiple of 32"),
    ("fp8_blocks", put("weight_scale_inv", None), "weight_scale is missing of a matrix in FP8"),
    ("fp8_blocks", put("weight_scale_inv", torch.ones(1, 1)), "weight_scale_inv is F32 [1, 1], not"),
    ("fp8_static", put("weight", torch.ones(32, 64).to(torch.float8_e5m2)), "is stored as F8_E5M2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), HEADERS, ids=lambda one: one if isinstance(one, str) else "")
def test_tensors_that_make_no_matrix(name, change, words, good, tmp_path):
    folder = changed(good(name), tmp_path, change)
    refused(lambda: load_model(folder), str(folder), words)


def test_a_mixed_up_shape_is_found_by_the_config(good, tmp_path):
    """A whole matrix of other sizes than config.json has."""
    wide = {"qweight": torch.ones(96, 4).int(), "qzeros": torch.ones(3, 4).int(), "scales": torch.ones(3, 32).half()}
    change = lambda tensors: tensors.update({f"{MODULE}.{part}": one for part, one in wide.items()})  # noqa: E731
    refused(lambda: load_model(changed(good("awq"), tmp_path, change)), MODULE, "(32, 96), not (32, 64)")


NUMBERS = [
    ("gptq_act", put("g_idx", torch.arange(64).int()), "g_idx has other groups than such of 32 channels"),
    ("gptq_act", put("g_idx", -torch.arange(64).int() + 9), "g_idx has other groups"),
    ("gptq_sym", put("qzeros", torch.zeros(1, 4).int()), "qzeros are not those of sym=true"),
    ("gptq", put("bias", torch.ones(32)), ""),
    ("awq", put("scales", torch.full((2, 32), float("nan")).half()), "NaN or infinity"),
]


@pytest.mark.parametrize(("name", "change", "words"), NUMBERS, ids=lambda one: one if isinstance(one, str) else "")
def test_numbers_that_cannot_be(name, change, words, good, tmp_path):
    folder = changed(good(name), tmp_path, change)
    if words:
        refused(lambda: load_model(folder), words)
    else:
        load_model(folder)  # the model has biases


def test_biases_that_autogptq_stores_of_a_model_without(tmp_path):
    made = make_checkpoint("llama", tmp_path / "made", **SIZES, attention_bias=False)
    folder = quantise(made, tmp_path / "gptq", FOLDERS["gptq"])[0]
    load_model(changed(folder, tmp_path, put("bias", torch.zeros(32).half())))
    other = changed(folder, tmp_path / "other", put("bias", torch.ones(32).half()))
    refused(lambda: load_model(other), MODULE, "has a bias, which the model that config.json describes has not")


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("awq", {"bits": 3}, "bits=3 is not read; read are 4"),
    ("awq", {"bits": "four"}, "bits='four' is not read"),
    ("awq", {"group_size": 48}, "group_size=48 is not read; read are multiples of 32"),
    ("awq", {"group_size": 64}, "qzeros is I32 [4, 8], not I32 [2, 8]"),
    ("awq", {"group_size": True}, "group_size=True"),
    ("awq", {"version": "gemv"}, "version='gemv' is not read, gemm is"),
    ("gptq", {"bits": 2}, "bits=2 is not read; read are 4, 8"),
    ("gptq", {"bits": None}, "bits=None"),
    ("gptq", {"bits": 8}, "qzeros is I32"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not read"),
    ("gptq", {"is_marlin_format": True}, "checkpoint_format='marlin'"),
    ("gptq", {"dynamic": {"+:(": {}}}, "dynamic: '+:(' is no pattern"),
    ("gptq", {"dynamic": [3]}, "dynamic gives no numbers by names"),
    ("gptq", {"dynamic": {r"+:.*k_proj": {"bits": 3}}}, f"{MODULE.replace('1', '0')}: bits=3 is not read"),
    ("gptq_sym", {"checkpoint_format": "gptq_v2"}, "qzeros are not those of sym=true"),
    ("w4a16", {"format": "mxfp4-pack-quantized"}, "format='mxfp4-pack-quantized' is not read"),
    ("w4a16", {"format": None}, "format=None is not read"),
    ("w4a16", {"config_groups": {}}, "config_groups says of no weights"),
    ("w4a16", {"config_groups": {"a": {"targets": ["re:("], "weights": {}}}}, "targets: 're:('"),
    ("w4a16", {"config_groups": {"a": {"targets": ["lm_head"], "weights": {}}}}, "no target of config_groups names it"),
    ("w4a16", {"config_groups": {"a": {"targets": ["Linear"]}}}, "has no weights"),
    ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ("w4a16", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ("fp8_blocks", {"fmt": "e5m2"}, "fmt='e5m2' is not read"),
    ("fp8_blocks", {"weight_block_size": [0, 128]}, "blocks of [0, 128]"),
    ("fp8_blocks", {"weight_block_size": None}, "weight_scale_inv is F32"),
    ("plain", FOLDERS["awq"], "says that weights are quantised (awq), but none is stored so"),
]


@pytest.mark.parametrize(("name", "change", "words"), CONFIGS)
def test_configs_that_lie_or_are_not_read(name, change, words, good, tmp_path):
    folder = Path(shutil.copytree(good(name), tmp_path / "copy"))
    said = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    edit_config(folder, quantization_config={**said, **change})
    refused(lambda: load_model(folder), str(folder), words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *[({"quant_method": one}, "quantised by") for one in ("quanto", "torchao", "vptq", "higgs", "spqr", "bitnet")],
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by bitsandbytes (NF4, FP4 or LLM.int8)"),
        ({"quant_method": "hqq"}, "quantised by HQQ (quantization_config); give one in AWQ, GPTQ"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "eetq"}, "EETQ"),
        ({"quant_method": "new\nthing"}, "'new\\nthing'"),
        ({"quant_method": ["awq"]}, "quantised by"),
        ({"group_size": 64, "bits": 4}, "MLX"),
        ({"bits": 4}, "quantised by None"),
        ([1], "is no object: [1]"),
    ],
)
def test_methods_that_are_not_read(config, words, good, tmp_path):
    folder = Path(shutil.copytree(good("plain"), tmp_path / "copy"))
    edit_config(folder, quantization_config=config)
    refused(lambda: load_model(folder), "quantization_config", words)


def test_configs_of_any_values_are_read_or_refused():
    """Each value, anywhere in a config, exchanged for others: never another error than ModelError."""
    rng = random.Random(0)
    others = [None, -1, 0, 4, 1e9, True, "", "x" * 500, "re:[", [], [[]], {}, {"a": 1}, ["Linear", 3]]
    read = 0

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(place for key, one in inner for place in places(one, (*path, key)))]

    for _ in range(2000):
        config = {"quantization_config": deepcopy(rng.choice(list(FOLDERS.values())))}
        *way, last = rng.choice(places(config)[1:])
        at: Any = config
        for key in way:
            at = at[key]
        at[last] = rng.choice(others)
        with contextlib.suppress(ModelError, PackedError):
            scheme = scheme_of(config, "folder")
            read += scheme is not None and scheme.format(MODULE) is not None
    assert read > 200


def test_nothing_is_allocated_for_what_is_refused(good, tmp_path, monkeypatch):
    """Headers alone are opened: no tensor is read."""
    folder = changed(good("awq"), tmp_path, put("scales", None))
    monkeypatch.setattr("saccade.models.dense_weights.safe_open", None)
    refused(lambda: load_model(folder), "scales is missing")
    assert set(READERS) == {"awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4"}
    assert open_checkpoint(good("awq")).packed is not None
