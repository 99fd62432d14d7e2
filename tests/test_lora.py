"""LoRA adapters in peft's format, against W + s B A summed by hand, and against peft itself where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_store import DenseStore, run_packed
from multimodal import wrapped
from packed_files import FOLDERS, quantise
from safetensors.torch import load_file, save_file
from test_cli import run
from tiny_models import make_checkpoint, one_thread, oracle, oracle_greedy, oracle_logits, random_ids  # noqa: F401

from saccade import LLM, SamplingParams
from saccade.errors import ModelError, RequestError, SaccadeError
from saccade.models import load_model

CLOSE = {"rtol": 0, "atol": 1e-4}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "bias": "none",
    "base_model_name_or_path": "somewhere/else", "inference_mode": True, "fan_in_fan_out": False, "use_rslora": False,
    "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True,
    "target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": None, "peft_version": "0.21.2",
}  # fmt: skip
TARGETS = "self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"


def write_adapter(
    base: Path, folder: Path, *, targets=TARGETS, seed: int = 0, start: str = "model.layers.", **fields: Any
) -> Path:
    """A random adapter for the checkpoint ``base`` with the ``fields`` of its config."""
    config, rng = {**CONFIG, **fields}, torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(targets):
            continue
        rank = next((r for key, r in config["rank_pattern"].items() if key in module), config["r"])
        called = f"base_model.model.{module.replace('model.layers.', start)}"
        tensors[f"{called}.lora_A.weight"] = 0.3 * torch.randn(rank, weight.shape[1], generator=rng)
        tensors[f"{called}.lora_B.weight"] = 0.3 * torch.randn(weight.shape[0], rank, generator=rng)
        if config["use_dora"]:
            tensors[f"{called}.lora_magnitude_vector"] = 0.5 + torch.rand(weight.shape[0], generator=rng)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(base: Path, adapter: Path, folder: Path, scale) -> Path:
    """The checkpoint with the adapter in it, by the definition; ``scale`` of a module's name."""
    weights, parts = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in parts if name.endswith("lora_A.weight")]:
        start = name.removesuffix("lora_A.weight")
        own = start.removeprefix("base_model.model.") + "weight"
        whole = weights[own].double() + scale(own) * parts[f"{start}lora_B.weight"].double() @ parts[name].double()
        if f"{start}lora_magnitude_vector" in parts:
            rows = (whole**2).sum(1).sqrt()
            whole = whole / rows[:, None] * parts[f"{start}lora_magnitude_vector"].double()[:, None]
        weights[own] = whole.float()
    folder.mkdir()
    for file in base.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("base") / "base", attention_bias=False)


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(base, folder / name, seed=seed) for seed, name in enumerate(("cats", "dogs"))]


CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "plain": ("llama", {}, lambda name: 6 / 4),
    "rslora": ("llama", {"use_rslora": True, "fan_in_fan_out": True}, lambda name: 6 / 2),
    "dora": ("llama", {"use_dora": True}, lambda name: 6 / 4),
    "patterns": (
        "qwen3",
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp\.down_proj": 10}},
        lambda name: 10 / 4 if "layers.1.mlp.down" in name else 6 / 2 if "q_proj" in name else 6 / 4,
    ),
    "modules": ("gemma3_text", {}, lambda name: 6 / 4),
    "head": ("phi", {"targets": ("lm_head", "dense", "fc2")}, lambda name: 6 / 4),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_sum(case, tmp_path):
    """And so are tokens, chunks, rounding to integers, and who the model is."""
    family, fields, scale = CASES[case]
    wide = {"hidden_size": 64} if case == "plain" else {}
    base = make_checkpoint(family, tmp_path / "base", **wide)
    adapter = write_adapter(base, tmp_path / "adapter", **fields)
    whole = merged(base, adapter, tmp_path / "whole", scale)
    ids, ours = random_ids(30, seed=1), load_model(base, lora=adapter)
    logits = run_packed(ours.runner, DenseStore(), {"a": ids})["a"]
    torch.testing.assert_close(logits, oracle_logits(oracle(whole), ids), **CLOSE)
    plain = run_packed(load_model(base).runner, DenseStore(), {"a": ids})["a"]
    assert (plain - logits).abs().max() > 0.1
    with LLM(base, lora=adapter, kv_memory="4MiB", prefill_chunk=8, block_size=16) as llm:
        assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == oracle_greedy(oracle(whole), ids, 8)
    if family == "llama" and case == "plain":
        for quantize in ("int4", "fp8_reference"):
            one, other = load_model(base, quantize=quantize, lora=adapter), load_model(whole, quantize=quantize)
            rows = [run_packed(model.runner, DenseStore(), {"a": ids})["a"] for model in (one, other)]
            assert (rows[0] - rows[1]).abs().max() < 0.2 * (rows[1] - logits).abs().max()  # a rounding may turn


def test_merged_weights_are_rounded_once(base, adapters, tmp_path):
    """In bfloat16 every weight is what the sum in float64 rounds to, but where float32 has a tie."""
    whole = merged(base, adapters[0], tmp_path / "whole", lambda name: 6 / 4)
    expected = {name: one.to(torch.bfloat16) for name, one in load_file(whole / "model.safetensors").items()}
    ours = load_model(base, dtype="bfloat16", lora=adapters[0]).runner.weights
    assert ours.keys() == expected.keys()
    different = sum(int((ours[name] != one).sum()) for name, one in expected.items())
    assert different <= 1e-3 * sum(one.numel() for one in expected.values())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:fan_in_fan_out")
def test_peft_agrees(tmp_path):
    """peft's own adapters, saved by it and merged by it."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    for number, (family, fields) in enumerate(
        [
            (
                "llama",
                {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 9}},
            ),
            ("qwen2", {"use_dora": True, "layers_to_transform": [0, 2], "target_modules": ["q_proj", "up_proj"]}),
            ("gemma2", {"fan_in_fan_out": True, "exclude_modules": ["o_proj"]}),
        ]
    ):
        base = make_checkpoint(family, tmp_path / f"base{number}")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        config = peft.LoraConfig(r=4, lora_alpha=6, **{"target_modules": "all-linear", **fields})
        made = peft.get_peft_model(model, config)
        rng = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
        made.save_pretrained(tmp_path / f"adapter{number}")
        theirs, ids = made.merge_and_unload().eval(), random_ids(30, seed=number)
        ours = load_model(base, lora=tmp_path / f"adapter{number}")
        logits = run_packed(ours.runner, DenseStore(), {"a": ids})["a"]
        torch.testing.assert_close(logits, oracle_logits(theirs, ids), **CLOSE)


@pytest.mark.parametrize("start", ["model.language_model.layers.", "language_model.model.layers."])
def test_adapters_of_multimodal_models(start, tmp_path):
    """Whatever transformers' version called the language model; what is a tower's is left."""
    base = make_checkpoint("mistral", tmp_path / "base")
    whole = wrapped(base, tmp_path / "wrapped", "llava", "first")
    adapter = write_adapter(base, tmp_path / "adapter", start=start)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for part, shape in (("A", (4, 8)), ("B", (8, 4))):
        tensors[f"base_model.model.model.vision_tower.blocks.0.lora_{part}.weight"] = torch.ones(shape)
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    ids = random_ids(20, seed=2)
    alone = load_model(base, lora=write_adapter(base, tmp_path / "alone"))
    ours = load_model(whole, lora=adapter)
    rows = [run_packed(model.runner, DenseStore(), {"a": ids})["a"] for model in (alone, ours)]
    assert torch.equal(*rows)
    assert ours.identity == alone.identity


def test_who_a_model_with_an_adapter_is(base, adapters, tmp_path):
    """Its sum: merged before or now; another adapter is another model, and sessions say which."""
    cats, dogs = (load_model(base, lora=adapter).identity for adapter in adapters)
    whole = merged(base, adapters[0], tmp_path / "whole", lambda name: 6 / 4)
    assert len({cats.digest, dogs.digest, load_model(base).identity.digest}) == 3
    assert load_model(base, quantize="int8", lora=adapters[0]).identity.weights == cats.weights
    assert load_model(base, quantize="fp8_reference", lora=adapters[0]).identity.weights == cats.weights
    merged_by_peft = load_model(whole)
    close = run_packed(merged_by_peft.runner, DenseStore(), {"a": [1, 2]})["a"]
    torch.testing.assert_close(
        close, run_packed(load_model(base, lora=adapters[0]).runner, DenseStore(), {"a": [1, 2]})["a"], **CLOSE
    )
    with LLM(base, lora=adapters[0], kv_memory="4MiB") as llm:
        session = llm.session()
        session.generate(random_ids(20, seed=1), GREEDY)
        session.save(tmp_path / "kept")
        expected = session.generate([5, 6, 7], GREEDY).outputs[0].token_ids
    with LLM(base, lora=adapters[0], kv_memory="4MiB") as llm:
        assert llm.restore(tmp_path / "kept").generate([5, 6, 7], GREEDY).outputs[0].token_ids == expected
    for other, words in (
        (adapters[1], r"the adapter 'cats \(\w{8}\)', not 'dogs \(\w{8}\)'"),
        (None, "not no adapter"),
    ):
        with LLM(base, lora=other, kv_memory="4MiB") as llm, pytest.raises(RequestError, match=words) as caught:
            llm.restore(tmp_path / "kept")
        assert "recompute=True" in str(caught.value)
        assert "\n" not in str(caught.value)
    with LLM(base, kv_memory="4MiB") as llm:
        session = llm.session()
        session.generate([1, 2, 3], GREEDY)
        session.save(tmp_path / "plain")
    said = pytest.raises(RequestError, match=r"no adapter, not 'dogs")
    with LLM(base, lora=adapters[1], kv_memory="4MiB") as llm, said:
        llm.restore(tmp_path / "plain")


def test_the_command_line(base, adapters, tmp_path, capsys):
    answers = []
    for lora in ([], ["--lora", str(adapters[0])]):
        code, out, _ = run(
            capsys, "generate", "-m", str(base), *lora, "--max-tokens", "8", "--temperature", "0", "hello"
        )
        assert code == 0
        answers.append(out)
    assert answers[0] != answers[1]
    code, out, err = run(capsys, "generate", "-m", str(base), "--lora", str(tmp_path), "hello")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "adapter_config.json" in err
    for command in ("chat", "serve", "eval run", "eval predict"):
        code, out, _ = run(capsys, *command.split(), "--help")
        assert "--lora" in out


BAD_CONFIGS = [
    ({"peft_type": "LOHA"}, "peft_type='LOHA' is not LORA; merge it with peft"),
    ({"peft_type": None}, "peft_type=None"),
    ({"bias": "all"}, "bias='all'"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not read"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"lora_bias": True}, "lora_bias"),
    ({"use_qalora": True}, "use_qalora"),
    ({"some_field_of_tomorrow": 1}, "some_field_of_tomorrow=1 is not read"),
    ({"init_lora_weights": "pissa_niter_4"}, "takes a part of the base model away"),
    ({"r": 0}, "r=0"),
    ({"r": "x"}, "r='x'"),
    ({"lora_alpha": None}, "lora_alpha=None"),
    ({"rank_pattern": [1]}, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha 'x'"),
    ({"r": 5}, "not of rank 5"),
    ({"use_dora": True}, "a part of .* is missing or too much"),
]


@pytest.mark.parametrize(("fields", "words"), BAD_CONFIGS, ids=lambda one: str(one)[:40])
def test_configs_that_are_refused(base, adapters, tmp_path, fields, words):
    for file in adapters[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}))
    with pytest.raises(ModelError, match=words) as caught:
        load_model(base, lora=tmp_path)
    assert "\n" not in str(caught.value)


LAYER = "base_model.model.model.layers.0.self_attn.q_proj."
NINTH = LAYER.replace(".0.", ".9.")
EXPERT = "base_model.model.model.layers.0.mlp.experts.3.w1."
BAD_TENSORS = [
    ({f"{LAYER}lora_A.weight": None}, "a part of .*q_proj is missing"),
    ({f"{LAYER}lora_A.weight": torch.ones(4, 47)}, r"is \[64, 47\], but \[64, 48\]"),
    ({f"{LAYER}lora_A.weight": torch.ones(4)}, "not of rank 4"),
    ({f"{LAYER}lora_magnitude_vector": torch.ones(64)}, "missing or too much"),
    ({"base_model.model.lm_head.weight": torch.ones(288, 48)}, "holds a whole tensor"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 288)}, "an embedding of its own"),
    ({f"{NINTH}lora_{part}.weight": torch.ones(4, 4) for part in "AB"}, "has no matrix of"),
    ({f"{EXPERT}lora_{part}.weight": torch.ones(4, 4) for part in "AB"}, "experts lie together"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_TENSORS, ids=lambda one: str(list(one))[:60])
def test_tensors_that_are_refused(base, adapters, tmp_path, changes, words):
    tensors = load_file(adapters[0] / "adapter_model.safetensors") | changes
    kept = {name: one for name, one in tensors.items() if one is not None}
    save_file(kept, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapter_config.json").write_text((adapters[0] / "adapter_config.json").read_text())
    with pytest.raises(ModelError, match=words) as caught:
        load_model(base, lora=tmp_path)
    assert "\n" not in str(caught.value)


def test_bases_and_folders_that_are_refused(base, adapters, tmp_path):
    wide = make_checkpoint("llama", tmp_path / "wide", hidden_size=64, intermediate_size=96)
    packed, _ = quantise(wide, tmp_path / "awq", FOLDERS["awq"])
    with pytest.raises(ModelError, match=r"awq are quantised; give the unquantised model, with quantize='int4'"):
        load_model(packed, lora=write_adapter(wide, tmp_path / "of wide"))
    tied = make_checkpoint("llama", tmp_path / "tied", tie_word_embeddings=True)
    head = write_adapter(base, tmp_path / "head", targets=("lm_head",))
    with pytest.raises(ModelError, match="changes lm_head, which is the embedding, too"):
        load_model(tied, lora=head)
    load_model(base, lora=head)
    for content, words in (
        ("{", "cannot be read as JSON"),
        ("[]", "not a JSON object"),
        ("{}", "holds no adapter_model"),
    ):
        (folder := tmp_path / words).mkdir()
        (folder / "adapter_config.json").write_text(content)
        with pytest.raises(ModelError, match=words):
            load_model(base, lora=folder)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(base, lora=folder)
    for value in ("", 3):
        with pytest.raises(SaccadeError, match="must be a folder that holds an adapter"):
            LLM(base, lora=value)
