"""FP8 on a GPU: passes equal to quantizing the plain ones, products equal to float32 ones of the dequantized operands,
and a model that answers as the dequantized reference does."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.eval.suite import make
from saccade.ops import fp8
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
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=5e-3, atol=0)  # of a largest value at an edge of bf16
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
    same(passes.gated(both), fp8.quantize(gated(both[:, :channels], both[:, channels:])))
    attended = draw(rows, channels // 32, 32, seed=4).transpose(0, 1)
    wanted = fp8.quantize(attended.transpose(0, 1).reshape(rows, channels))
    ours = passes.heads(attended)
    assert torch.equal(ours.values.float(), wanted.values.float())
    torch.testing.assert_close(ours.scale, wanted.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 65, 1000])
@pytest.mark.parametrize(("channels", "out", "bias"), [(4096, 6144, False), (64, 128, True), (208, 48, False)])
def test_products(rows, channels, out, bias):
    x = fp8.quantize(draw(rows, channels))
    matrix = fp8.Fp8Matrix.of(draw(out, channels, seed=1), draw(out, seed=2) if bias else None)
    ours, wanted = (one(x, matrix, torch.bfloat16) for one in (fp8.product, fp8.reference_product))
    assert ours.shape == wanted.shape == (rows, out)
    if rows:
        assert torch.isfinite(ours).all()
        assert float((ours.float() - wanted.float()).norm() / wanted.float().norm()) < 4e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_answers_as_the_reference_does(family, tmp_path):
    folder = make_checkpoint(family, tmp_path, max_position_embeddings=2048, hidden_size=64, head_dim=32)
    prompt, found = random_ids(700, seed=7), []
    for quantize in ("fp8", "fp8_reference"):
        options = {"kv_memory": "64MiB", "prefill_chunk": 256, "device": "cuda", "dtype": "bfloat16"}
        with LLM(folder, quantize=quantize, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            entries = llm.generate([prompt], params)[0].prompt_logprobs
        found.append(torch.tensor([entries[i][prompt[i]].logprob for i in range(1, len(prompt))]))
    assert float((found[0] - found[1]).abs().mean()) < 0.1


def test_a_trained_model_keeps_its_answers():
    """Eager, in a recorded step of three, and in a sparse prefill."""
    found = []
    prompts = [make(task, 1024, 1).turns[0] for task in ("multikey", "vt", "span_copy")]
    for quantize in (None, "fp8"):
        with LLM("reference", dtype="bfloat16", device="cuda", quantize=quantize) as llm:
            ids = [llm.tokenizer.apply_chat_template([{"role": "user", "content": turn.message()}]) for turn in prompts]
            params = SamplingParams(temperature=0, max_tokens=12)
            found.append([tokens(one) for one in llm.generate(ids, params, policy="dense")])
            found.append([tokens(one) for one in llm.generate(ids[:1], params, policy="flexprefill(lines=block)")])
    assert found[0] == found[2]
    assert found[1] == found[3]
