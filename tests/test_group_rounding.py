"""``quantize="int4"`` and ``"int8"``: codes against numpy, models against ones of the rounded weights, and refusals."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny, write
from test_cli import run
from tiny_models import oracle, oracle_logits, random_ids

from saccade import LLM, SamplingParams
from saccade.errors import SaccadeError
from saccade.models.facts import facts_of
from saccade.models.loader import load_model
from saccade.models.matrix_modules import MatrixEmbedding, MatrixExperts, MatrixProduct, matrices
from saccade.ops import cpu, group_rounding
from saccade.ops.group_rounding import rounded, rounded_matrix
from saccade.ops.group_weights import GroupMatrix
from saccade.ops.matrices import DenseMatrix
from saccade.ops.planes import PlaneMatrix

IDS = random_ids(40, seed=3)


def drawn(outputs: int = 37, channels: int = 96) -> torch.Tensor:
    """Weights of many sizes; groups of zeros, of one sign, of numbers too small for float16, and of equal ones."""
    rng = np.random.default_rng(0)
    made = rng.standard_normal((outputs, channels)) * 2.0 ** rng.integers(-12, 4, (outputs, 1))
    made[0, :32], made[1, :32], made[2, :32] = 0, np.abs(made[1, :32]), -np.abs(made[2, :32])
    made[3, :32], made[4, :32], made[5, :32], made[6] = 1e-12, 0.25, -0.25, made[6] * 1000
    return torch.from_numpy(made.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_weight_becomes_the_nearest_of_its_groups_values(bits, dtype):
    weight = drawn().to(dtype)
    codes, scales, zeros = rounded(weight, bits)
    assert (codes.dtype, scales.dtype, zeros.dtype) == (torch.uint8, torch.float16, torch.uint8)
    wide = weight.double().numpy().reshape(37, 3, 32)
    steps, offset = scales.double().numpy()[..., None], zeros.double().numpy()[..., None]
    every = steps * (np.arange(1 << bits) - offset)  # what a group's weights may become
    found = steps * (codes.double().numpy().reshape(37, 3, 32) - offset)
    nearest = np.abs(wide[..., None] - every[:, :, None]).min(-1)
    assert np.all(np.abs(found - wide) <= nearest * (1 + 1e-4) + 1e-12)
    span = np.maximum(wide.max(-1), 0) - np.minimum(wide.min(-1), 0)
    wanted = span / ((1 << bits) - 1)
    np.testing.assert_allclose(scales.numpy(), wanted.astype(np.float16), rtol=2e-3, atol=6e-8)
    # Half a step off at most, a whole one at an end, since the zero is rounded; and a scale is off by 2^-11, or by
    # half of the least float16, as often as a code says.
    assert np.all(np.abs(found - wide) <= steps + 256 * (steps * 2.0**-11 + 2.0**-25))


@pytest.mark.parametrize("bits", [4, 8])
def test_pieces_make_the_matrix_and_are_let_go(bits, monkeypatch):
    monkeypatch.setattr(group_rounding, "PIECE", 96 * 16)
    weight, bias, read = drawn(), torch.linspace(-1, 1, 37), []
    kept = weight.clone()
    made = rounded_matrix(weight, bits, bias, lambda part: read.append(part.shape[0]))
    assert read == [16, 16, 5]
    assert torch.equal(weight, kept)
    codes, scales, zeros = rounded(weight, bits)
    values = (codes.float().view(37, 3, 32) - zeros.float()[..., None]) * scales.float()[..., None]
    assert (made.outputs, made.channels, made.format) == (37, 96, f"INT{bits}_32")
    assert torch.equal(made.rows(torch.arange(37), torch.float32), values.flatten(1))
    monkeypatch.setattr(cpu, "available", lambda: False)
    plain = rounded_matrix(weight, bits, bias)
    assert isinstance(plain, GroupMatrix)
    assert torch.equal(plain.rows(torch.arange(37), torch.float32), values.flatten(1))
    assert plain.nbytes == 37 * (96 * bits // 8 + 3 * 3 + 4)


def test_weights_that_float16_has_no_scale_for_are_refused():
    with pytest.raises(SaccadeError, match=r"weights as large as 2e\+08 cannot be rounded to 8 bits"):
        rounded(torch.full((1, 32), 2e8), 8)


@pytest.mark.parametrize(
    ("family", "bits"),
    [("llama", 8), *((one, 4) for one in ("qwen2", "gemma2", "phi3", "qwen2_moe", "mixtral", "gpt_oss", "granitemoe"))],
)
def test_models_answer_as_transformers_with_the_rounded_weights(family, bits, tmp_path):
    """The same tokens, and log-probabilities within 1e-4; embedding and head in 8 bits, routers as they are."""
    folder = tiny(family, tmp_path / "made")
    theirs = oracle(folder)
    round_weights(theirs, bits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm = LLM(
            folder, dtype="float32", kv_memory="8MiB", quantize=f"int{bits}", device="cpu", enable_prefix_caching=False
        )
    with llm:
        formats = set(str(llm.model.identity.quantize).split("+"))
        assert formats == {f"INT{bits}_32", "INT8_32"}  # embedding and head
        out = llm.generate([IDS], SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0))[0]
        tokens = list(out.outputs[0].token_ids)
        found = torch.tensor([entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], IDS[1:])])
        wanted = torch.log_softmax(oracle_logits(theirs, IDS + tokens).float(), -1)
        assert wanted[len(IDS) - 1 : -1].argmax(-1).tolist() == tokens
        expected = wanted[: len(IDS) - 1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def round_weights(model, bits: int) -> None:
    """Exchange the weights of transformers' ``model`` for what they are rounded to."""
    ends = {model.get_input_embeddings().weight.data_ptr(), model.get_output_embeddings().weight.data_ptr()}
    done = set()
    for name, held in model.named_parameters():
        own, parent = name.rpartition(".")[2], name.rpartition(".")[0]
        matrix = held.dim() > 1 and own != "sinks" and not own.endswith("bias")
        router = parent.endswith((".gate", ".router", ".router.layer", "shared_expert_gate"))
        if not matrix or router or held.data_ptr() in done:
            continue
        done.add(held.data_ptr())
        by = 8 if held.data_ptr() in ends else bits
        across = held.transpose(-1, -2) if hasattr(model.get_submodule(parent), "down_proj_bias") else held
        rows = across.detach().reshape(-1, across.shape[-1]).contiguous()
        codes, scales, zeros = rounded(rows, by)
        values = (codes.float().unflatten(1, (-1, 32)) - zeros.float()[..., None]) * scales.float()[..., None]
        across.data.copy_(values.flatten(1).view(across.shape))


def test_what_stays_plain_is_named(tmp_path):
    """A matrix whose channels are no whole groups, and the gate of a shared expert."""
    made = tiny("qwen2_moe", tmp_path / "made", intermediate_size=80, shared_expert_intermediate_size=80)
    with pytest.warns(UserWarning, match=r"leaves 6 matrices in float32: model.layers.0.mlp.shared_expert.down_proj,"):
        model = load_model(made, "float32", quantize="int4")
    kinds = {name: one for name, one in model.runner.model.named_modules() if isinstance(one, MatrixProduct)}
    kept = {name for name, one in kinds.items() if isinstance(one.matrix, DenseMatrix)}
    assert {name.split("mlp.")[1] for name in kept} == {"shared_expert.down_proj", "shared_expert_gate"}
    experts = [one for one in model.runner.model.modules() if isinstance(one, MatrixExperts)]
    assert all(part.format == "INT4_32" for one in experts for part in one.experts[0])
    (table,) = (one for one in model.runner.model.modules() if isinstance(one, MatrixEmbedding))
    assert table.matrix.format == "INT8_32"


def test_memory_and_identity_tell_integers_apart(tmp_path):
    made = tiny("llama", tmp_path / "made")
    plain, *rounded = (load_model(made, quantize=one) for one in (None, "int8", "int4"))
    assert plain.weight_bytes > rounded[0].weight_bytes > rounded[1].weight_bytes
    assert all(one.identity.weights == plain.identity.weights for one in rounded)
    assert [one.identity.differences(plain.identity.data) for one in rounded] == [
        ["quantize=None, not 'INT8_32'"],
        ["quantize=None, not 'INT4_32+INT8_32'"],
    ]
    layer = rounded[1].runner.llama.weights.layers[0]
    assert isinstance(layer.down, PlaneMatrix) == cpu.available()
    assert rounded[1].notes == () if cpu.available() else "no kernel here" in rounded[1].notes[0]


def test_slow_products_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "available", lambda: False)
    with pytest.warns(UserWarning, match="no kernel here multiplies weights in INT8_32"):
        load_model(tiny("llama", tmp_path / "made"), quantize="int8")


def test_weights_that_have_few_bits_are_refused(tmp_path):
    made = tiny("llama", tmp_path / "made")
    file = write(made, tmp_path / "m.gguf", Kind.Q8_0)
    with pytest.raises(SaccadeError, match=r"quantize='int4' is for weights of 16 or 32 bits; m.gguf has fewer: leave"):
        LLM(file, quantize="int4", enable_prefix_caching=False)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe", "gpt_oss"])
def test_info_foretells_what_is_held(family, tmp_path, capsys):
    made = tiny(family, tmp_path / "made", tie_word_embeddings=family == "gemma2")
    facts = facts_of(made, "int4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(made, "float32", quantize="int4").runner
    weights = None if model.llama is None else model.llama.weights
    if weights is None:
        held = list(matrices(model.model))
    else:
        held = [weights.embedding, weights.head, *(part for layer in weights.layers for part in layer.matrices)]
    found: Counter[str] = Counter()
    for one in held:
        if one.format is not None:
            found[one.format] += sum(part.nbytes for part in one.stored)
    assert {name: size for name, size in facts.formats.items() if name.startswith("INT")} == dict(found)
    code, out, _ = run(capsys, "info", str(made), "--quantize", "int4")
    assert (code, "INT4_32" in out) == (0, True)
    code, _, err = run(capsys, "info", str(made), "--quantize", "fp8")
    assert (code, "quantize='fp8' is not foretold; known: int4, int8" in err) == (2, True)
