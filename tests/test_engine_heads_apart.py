"""The engine over a pool whose KV heads have slots of their own: nobody above kv/ knows."""

from __future__ import annotations

import kv_helpers
import pytest
from engine_helpers import GREEDY, tokens
from tiny_models import make_checkpoint, random_ids

from saccade import LLM
from saccade.kv import BlockManager

POLICIES = (
    "dense", "streaming(sinks=2, window=40)", "flexprefill(block_size=64, min_budget=64)+lfps(k=24)",
    "psa(epsilon=0.9)", "quest(budget=64, dense_layers=0)",
    "double_sparsity(dense_upto=0, k=32, source=prompt, dense_layers=0)",
    "magicpig(dense_upto=0, bits=4, tables=20, dense_every=0)", "minference(vertical=40, slash=30)+topk(k=24)",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose heads the C++ kernels read."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=512, head_dim=32)


def answers(folder) -> list[list[int]]:
    llm = LLM(folder, kv_memory="16MiB", prefill_chunk=128, dtype="float32", enable_prefix_caching=False)
    prompts = [random_ids(length, seed=length) for length in (230, 190, 223, 64, 130, 150, 90, 201)]
    done = [tokens(one) for one in llm.generate(prompts, GREEDY, policy=list(POLICIES))]
    assert llm.engine.pool.used_blocks == 0
    return done


def test_tokens_are_those_of_shared_slots(folder, monkeypatch):
    expected = answers(folder)

    def apart(storage, layers, **given):
        pool = BlockManager(storage, layers, heads_apart=True, **given)
        kv_helpers.scatter(pool)
        return pool

    monkeypatch.setattr("saccade.pools.BlockManager", apart)
    assert answers(folder) == expected
