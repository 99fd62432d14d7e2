"""What load_model returns, and the parts of transformers that loading and the layer loop stand on."""

from __future__ import annotations

import inspect
import logging
import socket
import threading
import warnings
from typing import Any

import pytest
import torch
from dense_store import DensePass, DenseStore, run_packed
from module_oracle import modules_of
from tiny_models import (  # noqa: F401
    BOS,
    EOS,
    VOCAB,
    edit_config,
    make_checkpoint,
    one_thread,
    oracle,
    oracle_logits,
    random_ids,
)
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as hf_logging

from saccade.errors import ModelError, RequestError
from saccade.models import LayerAttention, Segment, attention, load_model
from saccade.models.attention import MissingContextError, layer_attention, register, saccade_attention
from saccade.models.quiet import quiet_transformers


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama, tmp_path):
    import shutil

    return shutil.copytree(llama, tmp_path / "model")


def test_spec(tmp_path):
    loaded = load_model(make_checkpoint("gemma2", tmp_path))
    spec = loaded.spec
    assert (spec.family, spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == ("gemma2", 3, 4, 2, 16)
    assert (spec.vocab_size, spec.max_position, spec.dtype) == (VOCAB, 256, torch.float32)
    assert spec.windows == (7, None, 7)
    assert loaded.runner.spec is spec
    assert loaded.path == tmp_path
    assert loaded.notes == ()
    assert not loaded.runner.model.training


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "default"}, 256),
    ],
    ids=lambda value: str(value)[:24],
)
def test_max_position_counts_rope_scaling(copy, rope, expected):
    assert load_model(edit_config(copy, rope_parameters={"rope_theta": 1e4, **rope})).spec.max_position == expected


def test_no_network_is_touched(llama, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_model(llama)


def test_loading_is_quiet_and_leaves_logging_as_it_was(llama, capfd):
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity()
    load_model(llama)
    assert hf_logging.get_verbosity() == before
    assert capfd.readouterr() == ("", "")


def test_end_tokens_are_the_union(copy):
    (copy / "generation_config.json").write_text('{"eos_token_id": [3, 5], "temperature": 0.5, "do_sample": true}')
    loaded = load_model(copy)
    assert loaded.eos_token_ids == (3, 5, EOS)
    assert loaded.generation_config.temperature == 0.5


def test_without_generation_config(copy):
    (copy / "generation_config.json").unlink(missing_ok=True)
    assert load_model(copy).eos_token_ids == (EOS,)


def test_without_tokenizer_token_ids_still_work(tmp_path):
    loaded = load_model(make_checkpoint("llama", tmp_path, tokenizer=False))
    assert run_packed(loaded.runner, DenseStore(), {"a": [1, 2]})["a"].shape == (2, VOCAB)
    with pytest.raises(RequestError, match="no tokenizer"):
        loaded.tokenizer.encode("a")


def test_a_tied_head_that_is_stored_as_well(tmp_path):
    """Some savers write the tied head out a second time; that is no extra tensor."""
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint("qwen3", tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    plain = run_packed(load_model(folder).runner, DenseStore(), {"a": [1, 2, 3]})["a"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    twice = run_packed(load_model(folder).runner, DenseStore(), {"a": [1, 2, 3]})["a"]
    assert torch.equal(plain, twice)


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "glm4_moe", "cohere2"])
def test_bfloat16_equals_transformers(tmp_path, family):
    """As near to transformers' bfloat16 as that is to float32. By rows' median: rounding may flip a router's choice."""
    folder = make_checkpoint(family, tmp_path)
    loaded = load_model(folder, dtype="bfloat16")
    assert loaded.spec.dtype == torch.bfloat16
    ids = random_ids(30, seed=1)
    ours, theirs = (
        run_packed(loaded.runner, DenseStore(), {"a": ids})["a"],
        oracle_logits(oracle(folder, torch.bfloat16), ids),
    )
    exact = oracle_logits(oracle(folder), ids)
    assert ours.dtype == torch.float32
    assert (ours - theirs).norm(dim=1).median() <= 1.5 * (theirs - exact).norm(dim=1).median()


def save_as(folder, dtype, name: str | None):
    from safetensors.torch import load_file, save_file

    tensors = {key: tensor.to(dtype) for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return edit_config(folder, dtype=name, torch_dtype=name)


@pytest.mark.parametrize("named", [True, False])
def test_auto_dtype_is_the_checkpoints(copy, named):
    save_as(copy, torch.bfloat16, "bfloat16" if named else None)
    loaded = load_model(copy)
    assert loaded.spec.dtype == next(iter(loaded.runner.weights.values())).dtype == torch.bfloat16


@pytest.mark.parametrize("asked", ["auto", "float16", torch.float16])
def test_float16_on_a_cpu_runs_exactly_in_float32_and_says_so(copy, asked):
    save_as(copy, torch.float16, "float16")
    with pytest.warns(UserWarning, match="float16 does not run on a CPU.*dtype='bfloat16'"):
        loaded = load_model(copy, dtype=asked)
    assert loaded.spec.dtype == torch.float32
    assert len(loaded.notes) == 1


def test_old_dtype_key(copy):
    edit_config(copy, dtype=None, torch_dtype="bfloat16")
    assert load_model(copy).spec.dtype == torch.bfloat16


# --- the attention function -----------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.specs: list[LayerAttention] = []

    def run(self, layer, q, k, v, spec):
        self.specs.append(spec)
        return torch.zeros_like(q)


def call(**keywords: Any):
    module = nn.Module()
    module.layer_idx = 2
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    return saccade_attention(module, q, k, k, keywords.pop("mask", None), **keywords)


def test_extras_reach_the_context():
    recorder, sinks = Recorder(), torch.ones(4)
    out, weights = call(saccade=recorder, scaling=0.5, sliding_window=9, softcap=30.0, s_aux=sinks, position_ids=1)
    assert out.shape == (1, 3, 4, 8)
    assert weights is None
    assert recorder.specs == [LayerAttention(scale=0.5, window=9, softcap=30.0, sinks=sinks)]


def test_scale_defaults_to_one_over_root_head_dim():
    assert layer_attention(nn.Module(), None, {}, 16) == LayerAttention(scale=0.25)


def test_extras_we_do_not_know_are_refused():
    with pytest.raises(ModelError, match="attention_bias_table"):
        call(saccade=Recorder(), attention_bias_table=torch.ones(1))
    call(saccade=Recorder(), attention_bias_table=None)


def test_masks_are_refused():
    with pytest.raises(ModelError, match="mask"):
        call(saccade=Recorder(), mask=torch.ones(3, 3))


def test_running_outside_the_layer_loop_is_a_clear_error(llama, monkeypatch):
    monkeypatch.setattr(attention, "_outside", [])  # as before saccade.transformers is imported
    model = modules_of(llama)
    with pytest.raises(MissingContextError, match=r"HFRunner\.run"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_a_batch_is_refused():
    q = torch.zeros(2, 4, 3, 8)
    with pytest.raises(ValueError, match="batch of 2"):
        saccade_attention(nn.Module(), q, q, q, None, saccade=Recorder())


# --- the surfaces of transformers we touch --------------------------------------------------------------------------


def test_contract_attention_interface_takes_a_name_and_a_function():
    register()
    register()
    assert ALL_ATTENTION_FUNCTIONS["saccade"] is saccade_attention
    assert "saccade" in AttentionInterface().valid_keys()


def test_contract_no_mask_is_built_for_our_name(llama):
    """If transformers began to build masks for unknown names, the function would see one here and refuse."""
    model, recorder = modules_of(llama), Recorder()
    model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False, saccade=recorder)
    assert len(recorder.specs) == 3


def test_contract_loading_info(llama):
    _, info = AutoModelForCausalLM.from_pretrained(llama, output_loading_info=True)
    assert {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"} <= set(info)


def test_contract_modules_of_the_layer_loop(llama):
    model = load_model(llama).runner.model
    decoder = model.get_decoder()
    assert isinstance(decoder.layers, nn.ModuleList)
    assert isinstance(model.get_output_embeddings(), nn.Linear)
    for name in ("embed_tokens", "norm", "rotary_emb"):
        assert isinstance(getattr(decoder, name), nn.Module)
    taken = inspect.signature(type(decoder.layers[0]).forward).parameters
    assert {"attention_mask", "position_ids", "position_embeddings", "kwargs"} <= set(taken)
    left_out = {name for name, one in taken.items() if one.default is inspect.Parameter.empty and one.kind == 1}
    assert left_out <= {"self", "hidden_states"}, "the layer loop leaves the cache out, whatever its name"


# --- the runner's own checks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "word"),
    [
        ([Segment(0, 3, 3)], "cover 3 rows of 4"),
        ([Segment(1, 3, 3)], "start at row 0"),
        ([Segment(0, 2, 2), Segment(3, 1, 1)], "start at row 2"),
        ([Segment(0, 0, 1), Segment(0, 4, 4)], "tile"),
        ([], "cover 0 rows"),
    ],
)
def test_segments_must_tile_the_rows(llama, segments, word):
    runner = load_model(llama).runner
    with pytest.raises(ValueError, match=word):
        runner.run(torch.arange(4), torch.arange(4), Recorder(), segments=segments, logit_rows=torch.tensor([0]))


def test_positions_and_tokens_must_agree(llama):
    runner = load_model(llama).runner
    with pytest.raises(ValueError, match="must be \\[rows\\]"):
        runner.run(torch.arange(4), torch.arange(3), Recorder(), segments=[], logit_rows=torch.tensor([0]))


def test_no_wanted_rows_gives_no_logits(llama):
    """A chunk in the middle of a prefill wants none."""
    runner, segments = load_model(llama).runner, [Segment(0, 2, 4)]
    none = torch.tensor([], dtype=torch.int64)
    ctx = DensePass(DenseStore(), ["a"], segments)
    logits = runner.run(torch.tensor([1, 2]), torch.arange(2), ctx, segments=segments, logit_rows=none)
    assert logits.shape == (0, VOCAB)


def test_nothing_is_left_on_the_modules(llama):
    """All state lives with the sequences: a run leaves every parameter and buffer as it was, and needs no gradient."""
    runner = load_model(llama).runner
    before = {name: tensor.clone() for name, tensor in runner.weights.items()}
    logits = run_packed(runner, DenseStore(), {"a": [1, 2, 3]})["a"]
    assert not logits.requires_grad
    for name, tensor in runner.weights.items():
        assert torch.equal(tensor, before[name])


def test_importing_the_package_does_not_import_transformers():
    import subprocess
    import sys

    code = "import sys, saccade.models.interface, saccade.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_warning_is_not_an_error_by_itself(llama):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(llama, dtype="float32")


def test_transformers_speaks_again_once_all_threads_have_loaded():
    """Two that overlap, and leave in the order in which they came."""
    before, entered, left = hf_logging.get_verbosity(), threading.Event(), threading.Event()

    def second() -> None:
        with quiet_transformers():
            entered.set()
            assert left.wait(30)

    other = threading.Thread(target=second)
    with quiet_transformers():
        other.start()
        assert entered.wait(30)
    assert hf_logging.get_verbosity() == logging.CRITICAL
    left.set()
    other.join()
    assert hf_logging.get_verbosity() == before
