"""What the report says of estimated coverage, against a count of one's own over the keys that were read."""

from __future__ import annotations

import math

import pytest
import torch
from engine_helpers import GREEDY
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.steps.step import RequestResult, ScheduledRequest
from saccade.engine.watch.report import Report
from saccade.methods.policy import Policy
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
    assert report["coverage_estimated"] == pytest.approx(sum(estimates) / len(estimates), rel=1e-4)
    assert report["coverage_estimated_least"] == pytest.approx(min(estimates), rel=1e-4)
    assert report["coverage_estimated_least"] > epsilon


def test_methods_without_a_stopping_rule_report_no_estimate_of_coverage(llm):
    report = llm.generate(random_ids(100, seed=3), GREEDY, policy="topk(k=20)")[0].report
    for phase in ("prefill", "decode"):
        assert report[phase]["coverage_estimated"] is None
        assert report[phase]["coverage_estimated_least"] is None


def test_density_is_attended_over_causal_pairs_everywhere(llm, tiny_llama):
    """Layers that read unlike amounts: psaw gives each layer a window of its own, and the last layer skips rows."""
    policies = ["flexprefill(gamma=0.5, block_size=64, min_budget=0)+topk(k=24)", "streaming(window=40)", "psaw", "etf"]
    for policy in policies:
        report = llm.generate(random_ids(300, seed=3), GREEDY, policy=policy)[0].report
        for phase in ("prefill", "decode"):
            stats = report[phase]
            assert stats["density"] == pytest.approx(stats["keys_attended"] / stats["keys_causal"], abs=1e-3)


def test_the_evaluation_has_the_same_density(llm):
    from saccade.eval_cli.demo import Row

    report = llm.generate(random_ids(300, seed=3), GREEDY, policy="streaming(window=40)")[0].report
    assert Row("p", 1, [report], 1.0).density("prefill") == pytest.approx(report["prefill"]["density"], abs=1e-4)


def test_times_of_a_request_are_what_its_user_waits_for(llm):
    """They add up to the time from arrival to end, though the steps are shared."""
    for one in llm.generate([random_ids(200 + at, seed=at) for at in range(6)], GREEDY):
        report, seen = one.report, one.metrics
        phases = report["prefill"]["seconds"] + report["decode"]["seconds"]
        assert report["queue_seconds"] + phases <= report["total_seconds"] + 1e-4
        assert report["queue_seconds"] == pytest.approx(seen.time_in_queue, abs=1e-4)
        assert report["first_token_seconds"] == pytest.approx(seen.first_token_latency, abs=1e-4)
        assert report["total_seconds"] == pytest.approx(seen.finished_time - seen.arrival_time, abs=1e-4)
        assert report["queue_seconds"] + report["prefill"]["seconds"] <= report["first_token_seconds"] + 1e-4


def test_time_is_split_between_phases_without_rest():
    """By a clock of one's own: steps of 1, of 2 after a rest of 3, and of 1, the first two of them prefill."""
    report = Report(Policy.parse("dense"), 1)
    report.schedule(10.0)
    for phase, length, ended in (("prefill", 64, 11.0), ("prefill", 36, 16.0), ("decode", 1, 17.0)):
        rows = ScheduledRequest(1, 1, 0, length, phase, Policy.parse("dense"), 0, length, length)
        report.schedule(ended - 1.0)  # the first call alone counts
        report.take(rows, RequestResult(), ended)
    said = report.as_dict()
    assert (said["prefill"]["seconds"], said["decode"]["seconds"]) == (6.0, 1.0)
    assert said["prefill"]["tokens_per_second"] == pytest.approx(100 / 6, abs=1e-3)


def test_rates_of_a_batch_add_up():
    """Four requests that share ten steps of a second each make forty tokens in ten seconds: one a second each."""
    rates = []
    for _ in range(4):
        report = Report(Policy.parse("dense"), 1)
        report.schedule(0.0)
        for step in range(10):
            rows = ScheduledRequest(1, 1, step, step + 1, "decode", Policy.parse("dense"), 0, 1, 1)
            report.take(rows, RequestResult(), step + 1.0)
        rates.append(report.as_dict()["decode"]["tokens_per_second"])
    assert sum(rates) == pytest.approx(40 / 10)


def test_samples_of_one_prompt_wait_for_it_together(llm):
    output = llm.generate(random_ids(200, seed=3), SamplingParams(n=3, max_tokens=4, seed=1))[0]
    first, *others = output.reports
    for other in others:
        assert other["prefill"]["tokens"] == 0
        assert other["prefill"]["tokens_per_second"] is None
        assert 0 < other["prefill"]["seconds"] <= first["prefill"]["seconds"] + 1e-4
