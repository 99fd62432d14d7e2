"""The text of multimodal checkpoints, held against transformers' own multimodal model without images."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import quick
from dense_store import DenseStore, run_packed
from multimodal import make_multimodal, wrapped
from packed_files import FOLDERS, quantise
from safetensors.torch import load_file, save_file
from server_helpers import serving
from test_cli import run
from tiny_models import (  # noqa: F401
    edit_config,
    make_checkpoint,
    one_thread,
    oracle,
    oracle_greedy,
    oracle_logits,
    random_ids,
)

from saccade import LLM, SamplingParams
from saccade.errors import ModelError, RequestError
from saccade.models import load_model
from saccade.models.text_part import WRAPPERS
from saccade.models.tokenizer import load_tokenizer

QUICK = ("gemma3", "gemma3n", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CLOSE = {"rtol": 0, "atol": 1e-4}
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module", params=quick(sorted(WRAPPERS), lambda one: one in QUICK))
def pair(request, tmp_path_factory):
    """(folder, transformers' own multimodal model) of one type's tiny checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_multimodal(request.param, folder)


def test_logits_whole_and_in_ragged_chunks(pair):
    folder, theirs = pair
    ours, store = load_model(folder), DenseStore()
    texts = {"a": random_ids(33, seed=2), "b": random_ids(12, seed=3)}
    for name, ids in texts.items():
        whole = run_packed(ours.runner, DenseStore(), {name: ids})[name]
        as_exact(whole, theirs, ids)
    first = run_packed(ours.runner, store, {"a": texts["a"][:10], "b": texts["b"]}, {"a": 33, "b": 12})
    rest = run_packed(ours.runner, store, {"a": texts["a"][10:]}, {"a": 33})
    as_exact(torch.cat([first["a"], rest["a"]]), theirs, texts["a"])
    as_exact(first["b"], theirs, texts["b"])


def as_exact(found: torch.Tensor, theirs: Any, ids: list[int]) -> None:
    """``found``, float32 logits, are transformers' own within 1e-4; where a gated norm divides by next to nothing, its
    float64's within 1e-4, or twice what transformers' float32 is off."""
    given = oracle_logits(theirs, ids)
    if not torch.allclose(found, given, **CLOSE):
        exact = oracle_logits(deepcopy(theirs).double(), ids)
        off, own = (float((one - exact).abs().max()) for one in (found, given))
        assert off <= max(CLOSE["atol"], 2 * own), (off, own)


def test_greedy_tokens_of_a_batch_and_a_second_turn(pair):
    folder, theirs = pair
    prompts = [random_ids(length, seed=length) for length in (21, 1, 33)]
    with LLM(
        folder, dtype="float32", kv_memory="8MiB", prefill_chunk=8, block_size=16, enable_prefix_caching=False
    ) as llm:
        got = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        assert got == [oracle_greedy(theirs, ids, 10) for ids in prompts]
        with llm.session() as session:
            session.generate(prompts[0], GREEDY)
            said = list(session.token_ids)
            answer = session.generate(prompts[2], GREEDY).outputs[0].token_ids
        assert answer == oracle_greedy(theirs, said + prompts[2], 10)


@pytest.mark.parametrize(
    ("wrapper", "family", "layout"),
    [
        ("gemma3", "gemma3_text", "first"),
        ("gemma3", "gemma3_text", "now"),
        ("mistral3", "mistral", "first"),
        ("qwen2_5_vl", "qwen2", "qwen2_5_vl"),
        ("qwen2_5_vl", "qwen2", "now"),
        ("qwen3_vl", "qwen3", "now"),
        ("mistral3", "ministral3", "now"),
        ("kimi_k25", "deepseek_v3", "first"),
        ("smolvlm", "llama", "idefics"),
    ],
)
def test_every_layout_is_the_text_model_by_itself(wrapper, family, layout, tmp_path):
    """The same logits and the same identity; a tower of NaN is never looked at."""
    plain = {"use_sliding_window": False} if family.startswith("qwen") else {"final_logit_softcapping": None}
    text = make_checkpoint(family, tmp_path / "text", **plain)
    alone, ids = load_model(text), random_ids(30, seed=1)
    model = load_model(wrapped(text, tmp_path / "whole", wrapper, layout))
    logits = [run_packed(one.runner, DenseStore(), {"a": ids})["a"] for one in (alone, model)]
    assert torch.equal(*logits)
    assert model.identity == alone.identity
    assert load_model(text, quantize="int8").identity == load_model(tmp_path / "whole", quantize="int8").identity


@pytest.mark.parametrize(
    ("wrapper", "module"), [("qwen3_vl", "saccade.models.dense_weights"), ("gemma3", "transformers.modeling_utils")]
)
def test_the_rest_stays_on_disk(wrapper, module, tmp_path, monkeypatch):
    """No tensor that is not the language model's is read, by our loop or by transformers' modules."""
    import importlib

    family = {"qwen3_vl": "qwen3", "gemma3": "gemma3_text"}[wrapper]
    plain = {"use_sliding_window": False} if family == "qwen3" else {}
    folder = wrapped(make_checkpoint(family, tmp_path / "text", **plain), tmp_path / "whole", wrapper, "now")
    read: list[str] = []
    opened = importlib.import_module(module).safe_open

    class Slice:
        def __init__(self, name, part):
            self.name, self.part = name, part

        def __getitem__(self, key):
            read.append(self.name)
            return self.part[key]

        def __getattr__(self, name):
            return getattr(self.part, name)

    class Watched:
        def __init__(self, *args, **options):
            self.file = opened(*args, **options)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

        def get_slice(self, name):
            return Slice(name, self.file.get_slice(name))

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(f"{module}.safe_open", Watched)
    load_model(folder)
    assert len(set(read)) > 20
    assert not [name for name in read if "visual" in name]


@pytest.mark.parametrize(
    ("name", "wrapper", "family"),
    [
        ("awq", "qwen2_5_vl", "qwen2"),
        ("gptq_act", "qwen2_5_vl", "qwen2"),
        ("w4a16", "qwen2_5_vl", "qwen2"),
        ("fp8_blocks", "qwen2_5_vl", "qwen2"),
        ("w8a8", "gemma3", "gemma3_text"),
    ],
)
def test_quantised_text(name, wrapper, family, tmp_path):
    """Names in ``ignore`` are the whole model's. In our loop, and in transformers' modules."""
    config = deepcopy(FOLDERS[name])
    own = {"use_sliding_window": False} if family == "qwen2" else {"final_logit_softcapping": None}
    text = make_checkpoint(family, tmp_path / "made", hidden_size=64, intermediate_size=96, head_dim=16, **own)
    folder, theirs = quantise(text, tmp_path / "text", config)
    if "ignore" in config:
        stated = json.loads((folder / "config.json").read_text())["quantization_config"]
        stated["ignore"] = [one.replace("layers.0", r"model\.language_model\.layers.0") for one in stated["ignore"]]
        edit_config(folder, quantization_config=stated)
    whole, ids = wrapped(folder, tmp_path / "whole", wrapper, "now"), random_ids(30, seed=4)
    ours = load_model(whole, dtype="float32")
    assert ours.identity.quantize is not None
    logits = run_packed(ours.runner, DenseStore(), {"a": ids})["a"]
    torch.testing.assert_close(logits, oracle_logits(theirs, ids), **CLOSE)


def test_configs_that_are_flat_and_heads_that_are_tied(tmp_path):
    """Qwen2-VL's first configs have all fields at the top."""
    theirs = make_multimodal("qwen2_vl", tmp_path / "made", tie_word_embeddings=True)
    folder = tmp_path / "made"
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["rope_theta"] = rope["rope_theta"]
    (folder / "config.json").write_text(json.dumps({**text, **config}))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    ids = random_ids(30, seed=5)
    logits = run_packed(load_model(folder).runner, DenseStore(), {"a": ids})["a"]
    torch.testing.assert_close(logits, oracle_logits(theirs, ids), **CLOSE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return wrapped(
        make_checkpoint("llama", tmp_path_factory.mktemp("text") / "text"),
        tmp_path_factory.mktemp("whole") / "whole",
        "llava",
        "now",
    )


def test_an_image_is_refused_by_name(folder):
    words = {"type": "text", "text": "What is this?"}
    with LLM(folder, kv_memory="4MiB", enable_prefix_caching=False) as llm:
        with pytest.raises(RequestError, match="message 0 has a part of type 'image_url'; models read text alone"):
            llm.chat([{"role": "user", "content": [words, IMAGE]}], GREEDY)
        with pytest.raises(RequestError, match=r"multi_modal_data \(image\); models read text alone"):
            llm.generate({"prompt": "What is this?", "multi_modal_data": {"image": object()}}, GREEDY)
        said = llm.chat([{"role": "user", "content": [words]}], GREEDY)[0].outputs[0].token_ids
        assert said == llm.chat([{"role": "user", "content": words["text"]}], GREEDY)[0].outputs[0].token_ids
    with serving(LLM(folder, kv_memory="4MiB", enable_prefix_caching=False)) as server:
        answer = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": [words, IMAGE]}]})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_content"
        assert "image_url" in answer.json()["error"]["message"]
        told = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}
        answer = server.ask("/v1/responses", told)
        assert (answer.status_code, "input_image" in answer.text) == (400, True)


def test_info_says_what_a_multimodal_folder_is(folder, capsys):
    code, out, err = run(capsys, "info", str(folder))
    assert (code, err) == (0, "")
    assert all(part in " ".join(out.split()) for part in ("llama", "the text of llava"))


def test_what_is_not_checked_or_answers_otherwise_is_refused(folder, tmp_path):
    for changes, words in (
        ({"model_type": "paligemma"}, r"paligemma.*multimodal.*not held against transformers here"),
        ({"architectures": ["LlavaForSequenceClassification"]}, "not a language model with a head"),
        ({"architectures": True}, "True, not a language model with a head"),
        ({"text_config": {"model_type": "persimmon"}}, "'persimmon' is not supported"),
        ({"text_config": {"model_type": "mamba"}}, "recurrent"),
        ({"text_config": {"model_type": "granite"}}, "granite models scale their logits"),
        ({"text_config": {"model_type": ["llama"], "hidden_size": []}}, "hidden_size must be"),
        ({"text_config": 3, "hidden_size": "x"}, "hidden_size must be"),
    ):
        other = tmp_path / str(len(list(tmp_path.iterdir())))
        other.mkdir()
        for file in folder.iterdir():
            (other / file.name).symlink_to(file)
        (other / "config.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ModelError, match=words):
            load_model(other)


def test_tensors_of_the_language_model_that_are_missing_or_odd(folder, tmp_path):
    for name, words in (("model.language_model.norm.weight", "no weights"), ("model.language_model.odd", "no place")):
        other = tmp_path / name
        other.mkdir()
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(name, None) if words == "no weights" else tensors.update({name: torch.zeros(3)})
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        (other / "config.json").write_text((folder / "config.json").read_text())
        with pytest.raises(ModelError, match=words):
            load_model(other)


def test_every_type_is_named():
    text = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
    listed = text.partition("`RequestError` in Python):\n\n")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", listed) == sorted(WRAPPERS)


def test_templates_of_processors(folder, tmp_path):
    """One in a file of its own, that shows parts alone: a text is given to it as one, and stays a text."""
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    for file in folder.iterdir():
        if "template" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.has_chat_template
    for content in ("h\ni", [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": content}])
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<user>h\ni"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "<eos>"}])
    assert len(ids) == 6
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<eos>"
    (tmp_path / "chat_template.json").write_text("[]")
    assert not load_tokenizer(tmp_path).has_chat_template
