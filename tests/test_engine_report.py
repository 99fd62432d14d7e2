"""What the report says of coverage, against a count of one's own over the keys that were read."""

from __future__ import annotations

import math

import pytest
import torch
from engine_helpers import GREEDY
from tiny_models import random_ids

from saccade.selection import Blocks

SIZE = 16


@pytest.fixture
def observed(llm):
    calls = []
    llm.engine.watch.observer = lambda call: calls.append(coverages(call)) if call.phase == "decode" else None
    yield calls
    llm.engine.watch.observer = None


def coverages(call) -> list[float]:
    """For each KV head Alg. 1's estimate after the last block read, by the least of the blocks ranked (rest=min)."""
    assert isinstance(call.selection, Blocks)
    length, group = call.kv.length, call.q.shape[0] // call.kv.kv_heads
    full = length // SIZE
    always = {0, 1, full - 1, *([full] if length % SIZE else [])}
    logits = [
        (call.kv.keys()[head // group].double() @ call.q[head, 0].double()) / math.sqrt(call.q.shape[-1])
        for head in range(call.q.shape[0])
    ]
    found = []
    for kv_head in range(call.kv.kv_heads):
        keys = call.selection.mask()[kv_head * group, 0].nonzero()[:, 0]
        ranked = sorted(set((keys // SIZE).tolist()) - always)
        left = full - 3 - len(ranked)
        by_head = []
        for head in range(kv_head * group, (kv_head + 1) * group):
            blocks = logits[head][: full * SIZE].unflatten(0, (full, SIZE)).logsumexp(1)
            rest = left * torch.exp(blocks[ranked].min() - logits[head][keys].logsumexp(0))
            by_head.append(1 / (1 + float(rest)))
        found.append(min(by_head))
    return found


@pytest.mark.parametrize("epsilon", [0.3, 0.6])
def test_the_coverage_of_the_report_is_the_stopping_rules(llm, observed, epsilon):
    policy = f"psa(epsilon={epsilon}, block_size={SIZE}, microbatch=1, rest=min)"
    report = llm.generate(random_ids(240, seed=3), GREEDY, policy=policy)[0].report["decode"]
    estimates = [estimate for call in observed for estimate in call]
    assert len(estimates) == 9 * 3 * 2  # steps, layers, KV heads
    assert report["density"] < 0.9
    assert report["coverage"] == pytest.approx(sum(estimates) / len(estimates), rel=1e-4)
    assert report["coverage_least"] == pytest.approx(min(estimates), rel=1e-4)
    assert report["coverage_least"] > epsilon


def test_methods_without_a_stopping_rule_report_no_coverage(llm):
    report = llm.generate(random_ids(100, seed=3), GREEDY, policy="topk(k=20)")[0].report
    for phase in ("prefill", "decode"):
        assert report[phase]["coverage"] is None
        assert report[phase]["coverage_least"] is None
