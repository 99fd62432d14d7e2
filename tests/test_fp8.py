"""Products in FP8 on the CPU: e4m3 against its definition, products against float64 of the dequantized operands, the
passes under Triton's interpreter, a trained model's answers and perplexity beside its own, and refusals."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from fp8_helpers import losses_and_answers, same
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.engine.settings.config import EngineConfig
from saccade.errors import ModelError, SaccadeError
from saccade.models.loader import load_model
from saccade.ops import fp8
from saccade.ops.fp8_weights import Fp8Matrix
from saccade.ops.triton import fp8 as passes
from saccade.ops.triton.rows import add_norm

# Every finite value of e4m3: a sign, 4 bits of exponent biased by 7, 3 of mantissa; 448 is the largest.
E4M3 = sorted(
    {m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)}
)
E4M3 = [value for value in E4M3 if value <= 448]


def draw(*size, seed=0, dtype=torch.float32):
    return (3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def test_rows_are_rounded_to_the_nearest_value_of_the_format():
    assert len(E4M3) == 127
    x = torch.cat([draw(6, 96), 1e-3 * draw(2, 96, seed=1), torch.zeros(1, 96)]).t().contiguous().t()
    rows = fp8.quantize(x)
    known, values = torch.tensor(E4M3, dtype=torch.float64), rows.values.double()
    assert torch.isin(values.abs(), known).all()
    wanted = x.double() / rows.scale.double()
    gaps = torch.tensor([high - low for low, high in pairwise(E4M3)], dtype=torch.float64)
    room = gaps[torch.bucketize(wanted.abs().contiguous(), known).clamp(1, 126) - 1] / 2
    assert ((values - wanted).abs() <= room * (1 + 1e-5)).all()
    assert torch.equal(values.abs().amax(-1), torch.tensor([448.0] * 8 + [0.0], dtype=torch.float64))
    assert torch.isfinite(rows.scale).all()


@pytest.mark.parametrize("bias", [False, True])
def test_reference_products_are_those_of_the_dequantized_operands(bias):
    x, weight = draw(7, 160), draw(48, 320, seed=1)[:, ::2]
    matrix = Fp8Matrix.of(weight, draw(48, seed=2) if bias else None, reference=True)
    rows = fp8.quantize(x)
    wanted = rows.dequantized().double() @ matrix.dequantized().double().t()
    wanted = wanted + matrix.bias.double() if bias else wanted
    torch.testing.assert_close(matrix.product(rows).double(), wanted, rtol=1e-5, atol=1e-4)
    parts = [part.product(rows) for part in matrix.split([16, 32])]
    torch.testing.assert_close(torch.cat(parts, 1).double(), wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(matrix.rows(torch.tensor([3, 3, 0]), torch.float32), matrix.dequantized()[[3, 3, 0]])
    true = x.double() @ weight.double().t() + (matrix.bias.double() if bias else 0)
    assert float((wanted - true).norm() / true.norm()) < 0.05  # e4m3 rounds by 1/16 at most, by 1/40 on the whole


@pytest.mark.parametrize(("rows", "channels"), [(1, 208), (9, 96)])
def test_the_passes_are_the_plain_ones_quantized(rows, channels):
    x, other = draw(rows, 2 * channels, dtype=torch.float16)[:, :channels], draw(rows, channels, seed=1).half()
    weight = draw(channels, seed=2).half()
    copy = x.clone()
    same(passes.add_norm(x, other, weight, 1e-5), fp8.quantize(add_norm(copy, other, weight, 1e-5)))
    assert torch.equal(x, copy)
    same(passes.add_norm(x, None, weight, 1e-5), fp8.quantize(add_norm(copy, None, weight, 1e-5)))
    gate, up = draw(rows, 3 * channels, seed=3).half()[:, channels:].chunk(2, -1)
    same(passes.gated(gate, up), fp8.quantize(torch.nn.functional.silu(gate) * up))
    attended = draw(rows, 5, 24, seed=4).half().transpose(0, 1)
    same(passes.heads(attended), fp8.quantize(attended.transpose(0, 1).reshape(rows, -1)))
    assert passes.heads(attended[:, :0]).values.shape == (0, 120)


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_a_layer_computes_what_its_dequantized_weights_do(family, tmp_path):
    """Against the modules with the dequantized weights: what is left is the rounding of activations."""
    folder = make_checkpoint(family, tmp_path)
    ids = random_ids(60, seed=1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(llm):
        with llm:
            entries = llm.generate([ids], params)[0].prompt_logprobs
        return torch.tensor([entries[i][ids[i]].logprob for i in range(1, len(ids))])

    plain = LLM(folder, dtype="float32", kv_memory="8MiB", enable_prefix_caching=False)
    quantized = LLM(folder, dtype="float32", kv_memory="8MiB", quantize="fp8_reference", enable_prefix_caching=False)
    assert quantized.model.weight_bytes < plain.model.weight_bytes
    assert quantized.model.identity != plain.model.identity
    layers = zip(plain.model.runner.llama.weights.layers, quantized.model.runner.llama.weights.layers)
    for one, part in [pair for layer, other in layers for pair in zip(layer.matrices, other.matrices)]:
        values = part.dequantized()
        assert float((one.weight - values).abs().max() / one.weight.abs().max()) <= 0.036  # 16 of 448
        one.weight.copy_(values)
    wanted, got = logprobs(plain), logprobs(quantized)
    assert not torch.equal(wanted, got)  # activations are rounded
    assert float((wanted - got).abs().mean()) < 0.35


@pytest.fixture(scope="module")
def trained():
    quantized = LLM("reference", dtype="float32", quantize="fp8_reference", exact=False, enable_prefix_caching=False)
    with LLM("reference", dtype="float32", exact=False, enable_prefix_caching=False) as plain, quantized:
        yield plain, quantized


def test_a_trained_model_keeps_its_answers_and_its_perplexity(trained):
    """Perplexity of gold answers within 1 %, of the prompts before them, whose filler is drawn at random, within 10 %;
    and it says what it said."""
    (prompt, gold, said), (own_prompt, own_gold, own_said) = (
        losses_and_answers(llm, ("multikey", "span_copy")) for llm in trained
    )
    assert abs(math.exp(own_prompt - prompt) - 1) < 0.1
    assert abs(math.exp(own_gold - gold) - 1) < 0.01
    assert own_said == said


def test_refusals_name_the_reason_and_the_way_out(tmp_path):
    with pytest.raises(
        SaccadeError, match=r"quantize='int3' is unknown; known: int4, int8, fp8, fp8_reference, or None"
    ):
        EngineConfig(quantize="int3")
    llama = make_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(ModelError, match=r"the device is cpu, which has no FP8 products; leave it out"):
        load_model(llama, quantize="fp8")
    gemma = make_checkpoint("gemma2", tmp_path / "gemma2")
    with pytest.raises(ModelError, match=r"quantize='fp8_reference' is for models whose layers are Llama's"):
        load_model(gemma, quantize="fp8_reference")
    gelu = make_checkpoint("llama", tmp_path / "gelu", hidden_act="gelu")
    with pytest.raises(ModelError, match=r"not llama with hidden_act='gelu'; leave it out"):
        load_model(gelu, quantize="fp8_reference")
    odd = make_checkpoint("llama", tmp_path / "odd", hidden_size=40, head_dim=10)
    with pytest.raises(
        ModelError, match=r"a product of 40 by 80 channels cannot run in FP8, which takes multiples of 16"
    ):
        load_model(odd, quantize="fp8_reference")


def test_older_gpus_are_named(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    reason = fp8.why_not(device, torch.bfloat16)
    assert reason is not None
    assert "NVIDIA A100 has compute capability 8.0" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8.why_not(device, torch.bfloat16) is None
    assert fp8.why_not(device, torch.float16) == "its activations are bfloat16, not float16"
