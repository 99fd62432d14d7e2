"""KV heads that ranks share out by what each reads: who has which, and that nothing but the time of a layer changes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import fork_server
import pytest
import rank_threads
from engine_helpers import EVERY, finish
from gguf import GGMLQuantizationType as Kind
from gguf_files import WIDE, tiny, write
from packed_files import FOLDERS, quantise
from rank_helpers import PROMPTS, greedy, make, same
from test_lora import write_adapter
from test_ranks_families import POLICIES, SERVED, WIDER, ask, thorough_but, wider
from tiny_models import make_checkpoint, one_thread  # noqa: F401

from saccade import llm as llm_module
from saccade import ranks
from saccade.engine.messages import MapOrder
from saccade.methods.policy import Policy
from saccade.models.head_order import HeadDensities, busiest, orders_of, shared_out

pytestmark = pytest.mark.filterwarnings("ignore:no kernel here", "ignore:channels of weights", "ignore:quantize=")
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 512}


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Other ranks are threads."""
    monkeypatch.setattr(ranks, "subprocess", rank_threads.SUBPROCESS)


def measured(layers: int, kv_heads: int = 4) -> HeadDensities:
    """Such that no layer's heads stay where they are, and no two layers' go to the same places."""
    ways = [(0.9, 0.8, 0.2, 0.1), (0.9, 0.1, 0.8, 0.2), (0.1, 0.2, 0.7, 0.9)]
    return HeadDensities("psa", "a text", "2026-01-01", decode=tuple(ways[at % 3] for at in range(layers)))


@pytest.fixture
def shared(monkeypatch):
    """Has models of so many layers shared out so."""

    def share(layers: int) -> None:
        monkeypatch.setattr(llm_module, "find_heads", lambda folder, first: measured(layers))

    return share


@pytest.mark.parametrize("family", thorough_but(("phi3", "gpt_oss", "olmo2", "cohere", "qwen3_next"), SERVED))
def test_families(family, tmp_path, shared):
    folder = make_checkpoint(family, tmp_path, **wider(family, 4))
    from saccade.models.loader import load_model

    shared(load_model(folder).spec.layers)
    ask(folder, (1, 2))


def test_policies(tmp_path, shared):
    folder = make_checkpoint("llama", tmp_path, **LLAMA)
    shared(3)
    with make(folder, 1, kv_memory="8MiB", exact=False) as one, make(folder, 2, kv_memory="8MiB", exact=False) as two:
        print(two.model.part.orders)
        assert two.model.part.orders
        for policy in EVERY:
            own = [llm.generate(PROMPTS[:2], greedy(8), policy=policy) for llm in (one, two)]
            same(*own)
            for mine, theirs in zip(*own, strict=True):
                for phase in ("prefill", "decode"):
                    assert mine.report[phase]["keys_attended"] == theirs.report[phase]["keys_attended"], policy.text
                    assert mine.report[phase]["density_per_head"] == theirs.report[phase]["density_per_head"], (
                        policy.text
                    )


SIZES = {**WIDER, "intermediate_size": 128, "num_key_value_heads": 4}
PACKED = [
    ("llama", "awq"),
    ("qwen3_moe", "awq"),
    ("mixtral", "gptq"),
    ("phi3", "gptq_act"),
    ("gemma2", "w4a16_asym"),
    ("qwen2_moe", "fp8_dynamic"),
    ("llama", "fp8_blocks"),
    ("qwen3", "w8a8"),
    *(("llama", name) for name in FOLDERS),
]


@pytest.mark.parametrize(("family", "name"), PACKED)
def test_packed_weights(family, name, tmp_path, threads, shared):
    made = make_checkpoint(family, tmp_path / "made", **SIZES)
    folder, _ = quantise(made, tmp_path / name, FOLDERS[name])
    shared(3)
    ask(folder, (1, 2), exact=False)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize("family", ("mixtral", "gpt_oss", "gemma3_text", "phi3", "llama"))
def test_weights_rounded_as_they_load(family, quantize, tmp_path, threads, shared):
    folder = make_checkpoint(family, tmp_path, **SIZES)
    shared(3)
    ask(folder, (1, 2), POLICIES[1:], quantize=quantize, exact=False)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_gguf(family, tmp_path, shared):
    made = tiny(family, tmp_path / "made", **{**WIDE, "num_key_value_heads": 4}, max_position_embeddings=512)
    from saccade.models.loader import load_model

    shared(load_model(made).spec.layers)
    ask(write(made, tmp_path / "m.gguf", Kind.Q8_0), (1, 2), POLICIES[1:], exact=False)
