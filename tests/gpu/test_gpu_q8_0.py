"""Blocks of GGUF files on a GPU: the compiled kernel against float64, and a model's tokens against the CPU's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from engine_helpers import tokens
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny, write
from test_triton_tile_products import stored as drawn
from tiny_models import random_ids

from saccade import LLM, SamplingParams
from saccade.ops.block_weights import Q8_0
from saccade.ops.tile_weights import FORMATS, TileMatrix, tiled


@pytest.mark.parametrize("rows", [1, 8, 32, 100])
@pytest.mark.parametrize(("outputs", "channels", "biased"), [(4096, 4096, False), (203, 896, True), (1, 32, True)])
def test_products(rows, outputs, channels, biased):
    generator = torch.Generator().manual_seed(0)
    values = np.random.default_rng(1).standard_normal((outputs, channels), dtype=np.float32) / channels**0.5
    stored = gguf.quantize(values, Kind.Q8_0)
    x = torch.randn(rows, channels, generator=generator).to("cuda", torch.bfloat16)
    bias = torch.randn(outputs, generator=generator).to("cuda", torch.bfloat16) if biased else None
    held = tiled(Q8_0(torch.from_numpy(stored).cuda(), bias))
    assert isinstance(held, TileMatrix)
    exact = x.double() @ torch.from_numpy(gguf.dequantize(stored, Kind.Q8_0)).cuda().double().T
    exact = exact if bias is None else exact + bias.double()
    made = held.product(x)
    most = 8e-3 if rows <= 32 else 2e-2  # products of many rows round weights to bfloat16
    torch.testing.assert_close(made.double(), exact, rtol=most, atol=most)
    if rows <= 32:
        assert torch.equal(held.product(x[-1:]), made[-1:])  # a row hangs on no other


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", FORMATS)
def test_values_and_products_of_every_format(name, rows):
    held = drawn(name, 203, 1024, False, "cuda")
    stored = held.dequantised(slice(None))
    held = tiled(held)
    assert torch.equal(held.rows(torch.arange(203).cuda(), torch.float32), stored)
    values = stored.double()
    x = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(0)).cuda()
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)):  # results are rounded
        own = x.to(dtype)
        made, exact = held.product(own).double(), own.double() @ values.T
        assert bool(((made - exact).abs() <= most * (own.double().abs() @ values.abs().T)).all())


@pytest.mark.parametrize("stored", [Kind.Q8_0, Kind.Q5_0])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_model_answers_as_on_a_cpu(kind, stored, tmp_path: Path, monkeypatch):
    """In a prefill and in recorded steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tiny(kind, tmp_path / "made"), tmp_path / "m.gguf", stored)
    greedy, found = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for device in ("cpu", "cuda"):
        with LLM(file, dtype="float32", kv_memory="16MiB", device=device, enable_prefix_caching=False) as llm:
            found.append([tokens(one) for one in llm.generate([random_ids(60, seed=7), random_ids(9, seed=8)], greedy)])
    assert found[0] == found[1]
