"""Tiny models with sliding windows, and every sparse method with a plan for steps that many rows share."""

from __future__ import annotations

import pytest
from tiny_models import make_checkpoint

from saccade.models import llama_weights, probe

WINDOW = 72  # tokens
LENGTHS = 69, 100  # of prompts: one outgrows the window on the way, one has
METHOD = {
    "streaming": "streaming(sinks=2, window=40)",
    "quest": "quest(budget=48, dense_layers=1)",
    "arkvale": "arkvale(budget=48)",
    "locks": "locks(budget=48)",
    "psa": "psa(epsilon=0.4, microbatch=1, block_size=16)",
    "topk": "topk(k=24)",
    "cis": "cis(k=20, sinks=3, local=6, tau=0.0, r=2, m=9)",
    "lfps": "lfps(k=30, least=1, blocks=4)",
    "loopserve": "loopserve(alpha=1, budget=40, first=2, n_d=3)",
    "snapkv": "snapkv(capacity=40, window=8)",
    "adakv": "adakv(capacity=50, window=8)",
    "rocketkv": "rocketkv(capacity=60, window=8, kernel=5, keys=20)",
    "h2o": "h2o(budget=40)",
    "double_sparsity": "double_sparsity(dense_upto=0, source=prompt, dense_layers=1, k=24, channels=0.5)",
    "hshare": "hshare(source=prompt, heavy=20, sinks=3, local=5, every=3, layer_share=0.5)",
}
BY_KEYS = "psa(epsilon=0.4, rank=keys, rest=estimate, microbatch=1, block_size=16)"


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


def checkpoint(family: str, folder, **options):
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": WINDOW}
    return make_checkpoint(family, folder, max_position_embeddings=1024, **{**small, **options})


SIZES = None, 72, 102  # tokens


def of_two_sizes(folder, monkeypatch):
    """A Llama whose layers have windows of ``SIZES``."""
    monkeypatch.setattr(llama_weights, "_window", lambda attention, config: SIZES[attention.layer_idx])
    monkeypatch.setattr(probe, "configured_windows", lambda family, config: SIZES)
    return checkpoint("llama", folder, sliding_window=None)
