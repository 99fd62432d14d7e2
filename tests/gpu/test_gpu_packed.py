"""Quantised checkpoints on a GPU: a model's tokens against the CPU's, in a prefill and in recorded steps, and FP8
against what its weights are worth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import tokens
from packed_files import FOLDERS, quantise
from tiny_models import make_checkpoint, oracle_logits, random_ids

from saccade import LLM, SamplingParams
from saccade.ops import fp8
from saccade.ops.fp8_weights import Fp8Matrix, ScaledFp8Matrix

pytestmark = pytest.mark.filterwarnings("ignore:no kernel here", "ignore:channels of weights")
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_model_answers_as_on_a_cpu(name, tmp_path: Path):
    folder, _ = quantise(make_checkpoint("llama", tmp_path / "made", **SIZES), tmp_path / name, FOLDERS[name])
    greedy, found = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for device in ("cpu", "cuda"):
        with LLM(folder, dtype="float32", kv_memory="16MiB", device=device, enable_prefix_caching=False) as llm:
            found.append([tokens(one) for one in llm.generate([random_ids(60, seed=7), random_ids(9, seed=8)], greedy)])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["fbgemm", "fp8_dynamic", "fp8_static"])
def test_fp8_is_multiplied_as_such(name, tmp_path: Path):
    if reason := fp8.why_not(torch.device("cuda"), torch.bfloat16):
        pytest.skip(reason)
    folder, theirs = quantise(make_checkpoint("llama", tmp_path / "made", **SIZES), tmp_path / name, FOLDERS[name])
    ids = random_ids(60, seed=7)
    scored = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    with LLM(folder, dtype="bfloat16", kv_memory="16MiB", device="cuda", enable_prefix_caching=False) as llm:
        layers = llm.model.runner.llama.weights.layers
        assert {type(one) for one in (*layers[1].matrices, layers[1].joined, layers[1].both)} == {Fp8Matrix}
        entries = llm.generate([ids], scored)[0].prompt_logprobs[1:]
    found = torch.tensor([entry[token].logprob for token, entry in zip(ids[1:], entries)])
    wanted = torch.log_softmax(oracle_logits(theirs, ids)[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    # Rounding rows to e4m3 alone moves the log-probabilities of the plain weights by 0.21 to 0.25.
    assert float((found - wanted).abs().mean()) < 0.3


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("width", [128, None])
def test_fp8_by_blocks_is_read_as_it_lies(rows, width):
    if reason := fp8.why_no_products(torch.device("cuda")):
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, 2048, generator=generator).cuda().to(fp8.E4M3)
    blocks = 0.01 * torch.rand(8, 1 if width is None else 16, generator=generator).cuda()
    scales = blocks.repeat_interleave(128, 0)[:1000].contiguous()
    held = ScaledFp8Matrix(weight, scales, width or 2048, None, torch.bfloat16)
    assert held.has_kernel
    x = torch.randn(rows, 2048, generator=generator).to("cuda", torch.bfloat16)
    worth, made = held.dequantised(slice(None)).double(), held.product(x)
    most = x.double().abs() @ worth.abs().T
    assert bool(((made.double() - x.double() @ worth.T).abs() <= 8e-3 * most).all())
    if rows == 9:
        assert torch.equal(held.product(x[-1:]), made[-1:])
