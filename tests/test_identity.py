"""A model is what it computes with: content has one identity, wherever it lies; another content has another."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
import torch
from engine_helpers import make, tokens
from module_oracle import modules_of, with_modules
from safetensors.torch import load_file, save_file
from server_helpers import serving
from tiny_models import CONFIGS, make_checkpoint, random_ids
from tiny_models import one_thread as one_thread
from transformers import AutoModelForCausalLM

from saccade import SamplingParams
from saccade.errors import RequestError
from saccade.models.identity import meaningful
from saccade.models.loader import load_model
from saccade.records import Record, read_record, write_record

SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
FIRST, SECOND = random_ids(90, seed=1), random_ids(20, seed=2)


def identity(folder, **options):
    return load_model(folder, **{"dtype": "float32", **options}).identity


def changed(folder, into, **fields):
    """A copy whose config.json differs."""
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, **fields}))
    return into


def test_one_content_has_one_identity(tiny_llama, tmp_path, monkeypatch):
    own = identity(tiny_llama)
    monkeypatch.chdir(tiny_llama.parent)
    assert identity(tiny_llama.name) == own  # a relative path
    (tmp_path / "link").symlink_to(tiny_llama)
    assert identity(tmp_path / "link") == own
    cosmetics = {
        "transformers_version": "4.40.1",
        "_name_or_path": "elsewhere/model",
        "use_cache": False,
        "torch_dtype": "float32",
        "initializer_range": 0.5,
        "attention_dropout": 0.1,
        "eos_token_id": [257, 3],
        "something_new": {"a": 1},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000},
        "max_position_embeddings": 4096,  # a limit, where no factor hangs on it
    }
    assert identity(changed(tiny_llama, tmp_path / "copy", **cosmetics)) == own
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert identity(tmp_path / "saved") == own
    assert json.loads(json.dumps(own.data)) == own.data


def test_another_content_has_another(tiny_llama, tmp_path):
    own = identity(tiny_llama)
    shutil.copytree(tiny_llama, tmp_path / "bit")
    weights = load_file(tmp_path / "bit" / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    weights[name][7, 11] = torch.nextafter(weights[name][7, 11], torch.tensor(9.0))
    save_file(weights, tmp_path / "bit" / "model.safetensors", {"format": "pt"})
    other = identity(tmp_path / "bit")
    assert other.differences(own.data) == ["other weights"]
    for number, (fields, said) in enumerate(
        (
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope_parameters.rope_theta=10000"),
            ({"rms_norm_eps": 1e-3}, "rms_norm_eps=1e-06, not 0.001"),
            ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}, "num_attention_heads=4, not 2"),
        )
    ):
        other = identity(changed(tiny_llama, tmp_path / str(number), **fields))
        assert other.digest != own.digest
        assert any(one.startswith(said) for one in other.differences(own.data)), other.differences(own.data)


def test_types_are_named_and_weights_are_not_guessed_at(tmp_path):
    folder = make_checkpoint("llama", tmp_path / "model", hidden_size=64, num_hidden_layers=1)
    plain, narrow = identity(folder), identity(folder, dtype="bfloat16")
    assert narrow.differences(plain.data) == ["dtype='float32', not 'bfloat16'"]
    quantized = identity(folder, quantize="fp8_reference")
    assert quantized.differences(plain.data) == ["quantize=None, not 'fp8'"]
    assert quantized.weights == plain.weights  # quantized alike, they differ where these do


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "granite", "cohere2", "smollm3", "ministral3"])
def test_what_a_family_computes_with_is_part_of_it(family, tmp_path):
    """Every field that the family's tests set to change its logits."""
    whole = load_model(make_checkpoint(family, tmp_path, tokenizer=False)).identity
    for name, value in CONFIGS[family].items():
        if not isinstance(value, dict):
            assert whole.config[name] == value, name
    assert whole.config["rope_parameters"]
    assert ("windows" in whole.config) == ("sliding_window" in CONFIGS[family])


def test_a_length_counts_where_rotary_factors_hang_on_it(tmp_path):
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = load_model(make_checkpoint("llama", tmp_path, rope_parameters=scaled, num_hidden_layers=1)).config
    assert meaningful(config)["max_position_embeddings"] == 256


def test_a_server_at_another_path_goes_on(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny_llama.parent)
    with serving(make(tiny_llama.name, session_dir=tmp_path / "sessions")) as server:
        server.complete(FIRST, session_id="s")
    folder = changed(tiny_llama, tmp_path / "moved", transformers_version="4.40.1", _name_or_path="x")
    with serving(make(folder, session_dir=tmp_path / "sessions")) as server:
        again = server.complete(FIRST + SECOND, session_id="s").json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(FIRST)
        assert server.llm.sessions.counts["refused"] == 0
        assert again["choices"] == server.complete(FIRST + SECOND).json()["choices"]


def path_identity(model) -> str:
    """How versions before identities named a model."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(type(model).__name__.encode())
    digest.update(model.config.to_json_string(use_diff=False).encode())
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // 1024)][:1024].contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(picked.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_sessions_of_path_identities_are_converted_or_refused_for_what_they_are(llm, tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = os.path.relpath(tiny_llama)
    with llm.session() as session:
        session.generate(FIRST, SCORED)
        session.save(tmp_path / "talk")
        expected = session.generate(SECOND, SCORED)
    record = read_record(tmp_path / "talk", "saccade session")
    for name in (str(tiny_llama), relative, "elsewhere"):
        model = modules_of(tiny_llama, "float32")
        model.config._name_or_path = name
        record.data["engine"]["model"] = path_identity(model)
        write_record(tmp_path / "old", Record(record.kind, record.data, record.tensors))
        if name != "elsewhere":
            restored = llm.restore(tmp_path / "old")
            assert restored.note is None
            assert tokens(restored.generate(SECOND, SCORED)) == tokens(expected)
            restored.close()
            continue
        with pytest.raises(RequestError, match=r"identified models by their path.*recompute=True") as refused:
            llm.restore(tmp_path / "old")
        assert "another model" not in str(refused.value)
        restored = llm.restore(tmp_path / "old", recompute=True)
        assert tokens(restored.generate(SECOND, SCORED)) == tokens(expected)
        restored.close()


def test_another_type_is_named(llm, tiny_llama, tmp_path):
    from saccade import LLM

    with llm.session() as session:
        session.generate(FIRST, SCORED)
        session.save(tmp_path / "talk")
    with LLM(tiny_llama, dtype="bfloat16", kv_memory="4MiB", prefill_chunk=64) as narrow:
        with pytest.raises(RequestError, match="saved with dtype='float32', not 'bfloat16'; load the model with"):
            narrow.restore(tmp_path / "talk")
        assert not narrow.engine.sessions


def test_a_stored_session_of_a_path_identity_goes_on_and_is_written_anew(tiny_llama, monkeypatch):
    from types import SimpleNamespace

    from memory_store import MemoryStore

    from saccade.engine.sessions import Sessions

    store = MemoryStore()

    def opened():
        llm = make(tiny_llama, session_store=store)
        llm.sessions.segments.size = 32
        return llm

    first = opened()
    old = SimpleNamespace(data=path_identity(with_modules(first.model.runner).model))
    with monkeypatch.context() as patch:
        patch.setattr(Sessions, "identity", old)
        session = first.session("dense", name="talk")
        session.generate(FIRST, SCORED)
        first.sessions.flush()
    written = set(store.content)
    session.close()
    second = opened()
    session = second.session(name="talk")
    assert session.note is None
    session.generate(SECOND, SCORED)
    second.sessions.flush()
    assert not written & {key for key in store.content if not key.endswith("head")}
    session.close()
    with opened().session(name="talk") as session:  # by its new identity alone
        assert session.note is None
        assert session.sequence.computed == len(session.token_ids) - 1
