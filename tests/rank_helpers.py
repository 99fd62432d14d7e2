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
