"""benchmarks/gpu/hosted.py over a tiny model, where CPU tensors stand for the device: what its rows say is so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from saccade.models import attention
from saccade.models.interface import ModelSpec
from saccade.ops import cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ kernels")
MODULES = ("harness", "random_llama", "engine_steps", "tiered_steps", "hosted")  # of that folder, which is no package
LAYERS, HEADS, TOKENS, SHARE = 2, 8, 2048, 0.04


def built():
    attention.register()
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": LAYERS}
    rotary = {"rope_type": "default", "rope_theta": 500000.0}
    config = LlamaConfig(
        vocab_size=300, hidden_size=128, intermediate_size=128, max_position_embeddings=8192, rope_parameters=rotary,
        **sizes,
    )  # fmt: skip
    made = {"dtype": torch.bfloat16, "attn_implementation": attention.ATTENTION_NAME}
    model = AutoModelForCausalLM.from_config(config, **made).eval().requires_grad_(False)
    spec = ModelSpec(
        family="llama", layers=LAYERS, heads=HEADS, kv_heads=2, head_dim=32, vocab_size=300, max_position=8192,
        dtype=torch.bfloat16, windows=(None,) * LAYERS,
    )  # fmt: skip
    return model, spec


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosted")
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        patch.setenv("LONGEST", "8192")
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "gpu"))
        import engine_steps
        import harness
        import hosted

        patch.setattr(harness, "OUT", folder)
        patch.setattr(engine_steps, "measured_limits", dict)
        patch.setattr(hosted, "LARGE", 16)
        options = f"--tokens {TOKENS} --candidates {SHARE} --sequences 2 --threads 1 --as-served --device-gib 0.02"
        patch.setattr(sys, "argv", ["hosted.py", *options.split()])
        hosted.main(lambda: hosted.Hosted(built=built()))
    for name in MODULES:
        sys.modules.pop(name)
    return json.loads((folder / "hosted.json").read_text())["rows"]


def of(rows, policy: str, served: bool = False):
    found = [row for row in rows[1:] if row["policy"].startswith(policy) and row["what"].endswith("served") == served]
    assert len(found) == (1 if served else 3)
    return found


def test_the_planted_share_is_scored_in_every_step(rows):
    for row in of(rows, "lfps"):
        assert 1.1 * SHARE > row["scored_share"] > 0.95 * SHARE  # with the last and first keys
        assert row["scored_most"] < 1.05 * row["scored_least"]
        assert row["down"] == row["sequences"] * LAYERS * 2 * 32 * (HEADS + 4)


def test_all_is_read_on_the_cpu_and_nothing_is_fetched(rows):
    budget = round(0.02 * TOKENS)
    for served in (False, True):
        for policy, low, high in (
            ("quest", budget - 32, budget),
            ("topk", 0.0199 * TOKENS, 0.0225 * TOKENS),
            ("dense", TOKENS, 1.1 * TOKENS),
        ):
            for row in of(rows, policy, served):
                assert low <= row["attended"] <= high
                assert row["blocks_a_layer"] > 0
                assert (row["fetched"], row["bytes_fetched"]) == (0, 0)
    for row in of(rows, "dense"):
        assert row["blocks_a_layer"] == pytest.approx(row["context"] / 32, abs=1.5)
    assert [row["scored"] for row in of(rows, "topk")] == pytest.approx(
        [row["context"] for row in of(rows, "topk")], 0.01
    )


def test_what_was_computed_is_told_apart(rows):
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["sequences"] / row["ms_per_step"], rel=1e-3)
        longer = row["tokens_per_second"] * LAYERS / 32
        assert row["computed_tokens_per_second_of_32"] == pytest.approx(longer, rel=1e-3)
