"""What tests of several ranks share: engines of one process and of more, and what makes two answers the same."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_ids

from saccade import LLM, SamplingParams
from saccade.kv.format import KVFormat

LAYERS, BLOCKS = 3, 40  # of 32 tokens a layer: less than all requests below take at once
PROMPTS = [random_ids(length, seed=length) for length in (230, 150, 301, 64, 333)]
CLOSE = 1e-4  # of log-probabilities
SPARSE = "flexprefill(min_budget=32, block_size=64, gamma=0.3)"
MIXED = ["dense", SPARSE, f"{SPARSE}+quest(budget=64)", "psa(epsilon=0.3)", "lfps"]
ROOMY, TIGHT = 60, 13  # blocks a layer: more than all requests below take, and less than one takes and another
EXACT = (
    *("tokens", "density", "keys_attended", "keys_causal", "keys_attended_per_row", "density_per_layer"),
    *("density_per_head", "retrievals", "searches", "searchable", "rows_frozen", "backends", "certified"),
)


def make(folder, ranks: int, **options) -> LLM:
    memory = LAYERS * BLOCKS * KVFormat(torch.float32, max(1, 2 // ranks), 16, 32).block_bytes  # each rank's own
    settings = {"dtype": "float32", "prefill_chunk": 64, "device": "cpu", "threads": 1, "kv_memory": memory}
    return LLM(folder, tensor_parallel_size=ranks, **{"enable_prefix_caching": False, **settings, **options})


def greedy(count: int = 8, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2, **more)


def same(one, two) -> None:
    """Equal tokens, and log-probabilities that differ by rounding."""
    assert [output.error for output in (*one, *two)] == [None] * (len(one) + len(two))
    for own, other in zip(one, two, strict=True):
        for mine, theirs in zip(own.outputs, other.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=CLOSE)
            for left, right in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert {token: at.logprob for token, at in left.items()} == pytest.approx(
                    {token: at.logprob for token, at in right.items()}, abs=CLOSE
                )


def blocks(count: int, each: int) -> int:
    """Bytes of so many blocks a layer in each of ``count`` processes."""
    return LAYERS * each * KVFormat(torch.float32, max(1, 2 // count), 16, 32).block_bytes


def both(folder, ask, each: int = ROOMY, **options):
    """What ``ask`` gets of an engine of one process, and of one of two."""
    made = []
    for count in (1, 2):
        with make(folder, count, **{"kv_memory": blocks(count, each), "exact": False, **options}) as llm:
            made.append(ask(llm))
    return made


def alike_reports(mine: dict, theirs: dict) -> None:
    """Two reports of the same work. Keys that were scored are means over heads, which are rounded."""
    for phase in ("prefill", "decode"):
        own, others = mine[phase], theirs[phase]
        for name in EXACT:
            assert others[name] == own[name], (phase, name)
        for name in ("coverage_estimated", "coverage_estimated_least"):
            assert others[name] == (None if own[name] is None else pytest.approx(own[name], abs=1e-5)), (phase, name)
        for name in ("keys_scored", "keys_estimated"):
            assert others[name] == pytest.approx(own[name], abs=8 + own[name] / 500), (phase, name)
    assert theirs["cached_bytes"] == mine["cached_bytes"]
    assert theirs["notes"] == mine["notes"]
    assert (theirs["tiers"] is None) == (mine["tiers"] is None)
