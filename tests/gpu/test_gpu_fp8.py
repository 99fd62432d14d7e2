"""FP8 on a GPU: passes equal to quantizing the plain ones, products equal to float32 ones of the dequantized operands,
and a model that answers as the dequantized reference does."""

from __future__ import annotations

import math

import pytest
import torch
from engine_helpers import tokens
from fp8_helpers import losses_and_answers
from tiny_models import make_checkpoint

from saccade import LLM, SamplingParams
from saccade.eval.suite import make
from saccade.models.loader import load_model
from saccade.ops import fp8
from saccade.ops.fp8_weights import Fp8Matrix
from saccade.ops.triton import fp8 as passes
from saccade.ops.triton.rows import add_norm, gated

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and fp8.why_not(torch.device("cuda"), torch.bfloat16) is not None,
    reason="needs FP8 products",
)


def draw(*size, seed=0):
    return (3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to("cuda", torch.bfloat16)


def same(ours: fp8.QuantizedRows, theirs: fp8.QuantizedRows) -> None:
    """Equal but for values at a rounding edge."""
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=8e-3, atol=0)  # of a largest value at an edge of bf16
    one, other = ours.dequantized(), theirs.dequantized()
    assert float((one != other).float().mean()) < 0.3  # a scale an ulp of bf16 apart moves all values of its row
    torch.testing.assert_close(one, other, rtol=0.14, atol=1e-2 * float(other.abs().max()))
    assert float((one - other).norm() / other.norm()) < 0.01


@pytest.mark.parametrize(("rows", "channels"), [(1, 4096), (777, 4096), (300, 128), (33, 2880), (65, 14336)])
def test_passes(rows, channels):
    x, other, weight = draw(rows, 2 * channels)[:, :channels], draw(rows, channels, seed=1), draw(channels, seed=2)
    copy = x.clone()
    same(passes.add_norm(x, other, weight, 1e-5), fp8.quantize(add_norm(copy, other, weight, 1e-5)))
    assert torch.equal(x, copy)
    both = draw(rows, 2 * channels, seed=3)
    same(passes.gated(*both.chunk(2, -1)), fp8.quantize(gated(both[:, :channels], both[:, channels:])))
    attended = draw(rows, channels // 32, 32, seed=4).transpose(0, 1)
    wanted = fp8.quantize(attended.transpose(0, 1).reshape(rows, channels))
    ours = passes.heads(attended)
    assert float((ours.values.float() != wanted.values.float()).float().mean()) < 1e-4
    torch.testing.assert_close(ours.scale, wanted.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 65, 1000])
@pytest.mark.parametrize(("channels", "out", "bias"), [(4096, 6144, False), (64, 128, True), (208, 48, False)])
def test_products(rows, channels, out, bias):
    x = fp8.quantize(draw(rows, channels))
    weight, own = draw(out, channels, seed=1), draw(out, seed=2) if bias else None
    ours, wanted = (Fp8Matrix.of(weight, own, reference).product(x) for reference in (False, True))
    assert ours.shape == wanted.shape == (rows, out)
    if rows:
        assert torch.isfinite(ours).all()
        assert float((ours.float() - wanted.float()).norm() / wanted.float().norm()) < 4e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [1, 65])
def test_layers_compute_what_the_reference_does(rows, family, tmp_path):
    """From the same input; from layer to layer what is rounded otherwise would grow."""
    folder = make_checkpoint(family, tmp_path, max_position_embeddings=2048, hidden_size=64, head_dim=32)
    runners = [load_model(folder, "bfloat16", "cuda", name).runner for name in ("fp8", "fp8_reference")]
    angles = torch.outer(torch.arange(float(rows)), 0.3 ** torch.arange(16)).repeat(1, 2)
    cos, sin = angles.cos().to("cuda", torch.bfloat16), angles.sin().to("cuda", torch.bfloat16)
    for ours, theirs in zip(*(runner.llama.step_kernels().layers for runner in runners)):
        hidden, delta = draw(rows, 64), draw(rows, 64, seed=1)
        copy, attended = hidden.clone(), draw(rows, 4, 32, seed=2).transpose(0, 1)
        for one, other in zip(ours.project(hidden, cos, sin, delta), theirs.project(copy, cos, sin, delta)):
            close(one, other)
        assert torch.equal(hidden, copy)
        close(ours.finish(hidden, attended), theirs.finish(copy, attended))
        close(hidden, copy)


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.isfinite(one).all()
    assert float((one.float() - other.float()).norm() / other.float().norm()) < 0.03


def test_a_trained_model_keeps_its_answers_and_its_perplexity():
    """Eager in a long prefill, in recorded steps of three requests, and in a sparse prefill. Perplexity of gold answers
    within 1 %, of the prompts within 10 %."""
    found, tasks = [], ("multikey", "vt", "span_copy")
    prompts = [make(task, 1024, 1).turns[0] for task in tasks]
    for quantize in (None, "fp8"):
        with LLM("reference", dtype="bfloat16", device="cuda", quantize=quantize, enable_prefix_caching=False) as llm:
            ids = [llm.tokenizer.apply_chat_template([{"role": "user", "content": turn.message()}]) for turn in prompts]
            params = SamplingParams(temperature=0, max_tokens=12)
            dense = [tokens(one) for one in llm.generate(ids, params, policy="dense")]
            sparse = [tokens(one) for one in llm.generate(ids[:1], params, policy="flexprefill(lines=block)")]
            found.append((dense, sparse, *losses_and_answers(llm, tasks, 1024)))
    (dense, sparse, prompt, gold, said), (own_dense, own_sparse, own_prompt, own_gold, own_said) = found
    print(f"perplexity: prompts x {math.exp(own_prompt - prompt):.4f}, gold answers x {math.exp(own_gold - gold):.5f}")
    assert (own_dense, own_sparse, own_said) == (dense, sparse, said)
    assert abs(math.exp(own_prompt - prompt) - 1) < 0.1
    assert abs(math.exp(own_gold - gold) - 1) < 0.01
