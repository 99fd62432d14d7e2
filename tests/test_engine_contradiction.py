"""Estimates of coverage that an audit contradicts, beside true weights in float64; and that nothing else is told."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch
import triton_helpers  # noqa: F401  (sets the interpreter up first)
from device_helpers import put_on_device
from engine_helpers import make
from helpers import generator
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.device.audit import StepAudits
from saccade.engine.observing import observing
from saccade.engine.steps.step import CallCount
from saccade.engine.watch.audit import Audit, AuditOptions, RowAudit
from saccade.engine.watch.contradiction import (
    POLICIES,
    QUIET_SECONDS,
    TOLERANCE,
    Contradiction,
    Warnings,
    contradiction,
)
from saccade.engine.watch.estimates import Mean
from saccade.engine.watch.layer_stats import LayerStats
from saccade.engine.watch.report import Report
from saccade.engine.watch.truth import selected_rows
from saccade.kv.view import KVView
from saccade.methods.base import Chunk, Cost, Query
from saccade.methods.policy import Policy
from saccade.models.interface import LayerAttention
from saccade.ops import Call, run

HEADS, KV_HEADS, DIM, SIZE = 6, 2, 32, 32
WRONG = "psa(epsilon=0.9, rank=cuboid, rest=min)"
RIGHT = "psa(epsilon=0.9, rank=keys, rest=estimate)"
SPARSE = "psa(epsilon=0.95, block_size=16, microbatch=1, rank=cuboid, rest=min)"
SAME = "psa(epsilon=0.95, block_size=16, microbatch=1, rank=keys, rest=estimate)"
PARAMS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def planted(seed: int, length: int = 1200):
    """An induction head in KV head 1: of its queries the second looks for one key, in a block of light ones that the
    others like least; they, and all of KV head 0, look at the last key. ``q`` [heads, 1, d], ``k`` [kv_heads, n, d]."""
    rng = generator(seed)
    k, q = 0.3 * torch.randn(KV_HEADS, length, DIM, generator=rng), torch.empty(HEADS, 1, DIM)
    wanted, last = torch.linalg.qr(torch.randn(DIM, 2, generator=rng)).Q.T
    at = 400 + 37 * (seed % 20)
    block = at // SIZE * SIZE
    k[1, block : block + SIZE] -= 2.0 * wanted + 24.0 * last
    k[1, at], k[:, -1] = 8.0 * wanted - 24.0 * last, 8.0 * last
    q[:, 0], q[HEADS // KV_HEADS + 1, 0] = 8.0 * last, 8.0 * wanted
    return q, k


def audited(text: str, rows: int, rate: float = 1.0) -> tuple[Report, list[list[float]]]:
    """A request of one layer whose ``rows`` decode rows each have planted keys: its report, and for each row the true
    weight, in float64, that each KV head's query heads read on average."""
    policy, method = Policy.parse(text), Policy.parse(text).decode
    report = Report(policy, 1)
    report.audit = audit = Audit(AuditOptions(rate), seed=3)
    true = []
    for seed in range(rows):
        q, k = planted(seed)
        kv = KVView.from_tensors(k, k)
        query = Query.of(q, kv)
        chosen = method.select_decode(query, method.begin(Chunk.of(q, kv)))
        ran = run(Call.of(q, kv, chosen), "reference")
        report.decode.layers[0].add(CallCount.of(0, ran.used, Cost(), "reference", ran.coverage))
        drawn = RowAudit(audit, audit.draw(seed, 1, KV_HEADS), not method.stands_in)
        assert drawn.take(0, q[:, 0], ran.out[:, 0], ran.lse[:, 0], kv, LayerAttention(query.scale)) is None
        keys = k.double().repeat_interleave(HEADS // KV_HEADS, 0)
        weights = torch.softmax((keys @ q[:, 0, :, None].double())[..., 0] / math.sqrt(DIM), -1)
        true.append((weights * ran.used.mask()[:, 0]).sum(-1).unflatten(0, (KV_HEADS, -1)).mean(1).tolist())
    return report, true


def test_a_heavy_key_among_light_ones_contradicts_the_estimate():
    report, true = audited(WRONG, 8)
    stats = report.as_dict()
    found = stats["audit"]["contradiction"]
    lost, kept = (sum(row[head] for row in true) / len(true) for head in (1, 0))
    assert kept > 0.9
    assert lost < 0.7
    assert (found["layer"], found["kv_head"], found["heads"], found["samples"]) == (0, 1, 1, 8)
    assert found["estimated"] == pytest.approx(stats["decode"]["coverage_estimated_least"], abs=1e-6)
    assert found["estimated"] > 0.9
    assert found["low"] == pytest.approx(lost, abs=1e-4)  # all were audited: nothing is left to chance
    assert found["mean"] == found["low"] == found["high"]
    (note,) = stats["notes"]
    assert note == (
        f"psa estimated that {found['estimated']:.3f} of the attention weight was read; an audit of 8 rows "
        f"measured {lost:.3f} [{lost:.3f}, {lost:.3f}] in layer 0, KV head 1: "
        "use psa(rank=keys) or another method"
    )
    assert report.as_dict()["notes"] == [note]  # however often somebody asks


@pytest.mark.parametrize("text", [RIGHT, "dense", "topk(k=24)"])
def test_true_estimates_and_methods_without_any_are_not_contradicted(text):
    report, true = audited(text, 4)
    assert report.as_dict()["audit"]["contradiction"] is None
    assert report.as_dict()["notes"] == []
    if text == RIGHT:
        assert min(min(row) for row in true) > report.as_dict()["decode"]["coverage_estimated_least"] - TOLERANCE


def test_a_sample_tells_the_same_with_an_interval_that_holds_the_truth():
    report, true = audited(WRONG, 40, rate=0.6)
    found = report.as_dict()["audit"]["contradiction"]
    lost = sum(row[1] for row in true) / len(true)
    assert found["samples"] < 40
    assert found["kv_head"] == 1
    assert found["low"] < lost < found["high"] < found["estimated"] - TOLERANCE
    few, _ = audited(WRONG, 3, rate=0.4)  # one row may be an accident
    assert few.audit.masses
    assert few.as_dict()["audit"]["contradiction"] is None


def test_what_stands_in_for_unread_keys_is_measured_by_nobody():
    """Its log-sum-exp is no weight of keys that were read."""
    report, _ = audited("psa(epsilon=0.9, rank=cuboid, rest=min, tail=mean)", 2)
    assert report.as_dict()["audit"]["retained_mass"] is None
    assert report.as_dict()["audit"]["contradiction"] is None


def ruled(estimated: float, units: int, layers: int = 1, mean: float | None = None) -> list[LayerStats]:
    made = [LayerStats(estimates=100, units=units, least_covered=estimated) for _ in range(layers)]
    for one in made:
        one.covered = 100 * (estimated if mean is None else mean)
    return made


def test_chance_contradicts_a_true_estimate_in_few_requests():
    """Requests at the edge of what is tolerated, whose few bad rows a sample may meet or miss: every head's mean over
    its rows is the estimate less the tolerance. A head that loses half of that is found."""
    rng = generator(1)
    layers, heads, rows, estimated = 2, 3, 60, 0.9
    alarms = misses = 0
    for seed in range(600):
        weights = torch.ones(layers, heads, rows, dtype=torch.float64)
        weights.scatter_(-1, torch.rand(layers, heads, rows, generator=rng).topk(8).indices, 0.1)
        assert weights.mean(-1).sub(estimated - TOLERANCE).abs().max() < 1e-9
        edge, bad = Audit(AuditOptions(0.3), seed), Audit(AuditOptions(0.3), seed)
        for row in range(rows):
            bad.draw(row, layers, heads)
            for layer, drawn in edge.draw(row, layers, heads).items():
                for head in drawn:
                    weight = float(weights[layer, head, row])
                    edge.masses.setdefault((layer, head), Mean()).add(weight)
                    lost = 0.5 if (layer, head) == (1, 2) else 1.0
                    bad.masses.setdefault((layer, head), Mean()).add(lost * weight)
        alarms += edge.contradiction(ruled(estimated, heads, layers)) is not None
        found = bad.contradiction(ruled(estimated, heads, layers))
        misses += found is None or (found.layer, found.kv_head) != (1, 2)
    assert alarms <= 30, alarms  # one in twenty may
    assert misses <= 60, misses


def test_bounds_of_a_sample_hold_and_close_once_all_is_known():
    rng = generator(2)
    missed = 0
    for _ in range(1000):
        values = (torch.rand(50, generator=rng) ** 8).double()
        mean = Mean()
        for at in torch.randperm(50, generator=rng)[:12].tolist():
            mean.add(float(values[at]))
        low, high = mean.bounds(50)
        missed += not low <= float(values.mean()) <= high
    assert missed <= 50
    whole = Mean(50, float(values.sum()), float((values**2).sum()))
    assert whole.bounds(50) == pytest.approx((float(values.mean()),) * 2, abs=1e-12)
    assert Mean().bounds(50) == (0.0, 1.0)
    # Nothing but 0: chance p gives that n times with (1 - p)^n.
    assert Mean(20, 0.0).bounds(10**9) == pytest.approx((0.0, 1 - 0.025 ** (1 / 20)), abs=1e-6)
    assert Mean(20, 20.0, 20.0).bounds(10**9) == pytest.approx((0.025 ** (1 / 20), 1.0), abs=1e-6)


def test_a_rule_of_a_whole_layer_is_held_against_the_layer_alone():
    """Its estimate may be a mean over heads, of which one may keep less."""
    masses = {(0, 0): Mean(10, 10.0, 10.0), (0, 1): Mean(10, 8.2, 6.8)}
    assert contradiction(masses, ruled(0.9, units=1), 2, 10, True) is None  # 0.91
    found = contradiction(masses, ruled(0.9, units=2), 2, 10, True)
    assert (found.layer, found.kv_head, found.mean) == (0, 1, pytest.approx(0.82))
    found = contradiction(masses, ruled(0.95, units=1), 2, 10, True)
    assert (found.layer, found.kv_head, found.samples, found.mean) == (0, None, 20, pytest.approx(0.91))


def test_many_heads_that_are_each_within_bounds_contradict_the_mean_estimate_together():
    """The least estimate of each layer is kept, the mean one is not. With places left out the mean is of others."""
    masses = {(layer, head): Mean(40, 38.0, 36.5) for layer in range(3) for head in range(2)}
    layers = ruled(0.9, 2, 3, mean=0.99)
    found = contradiction(masses, layers, 2, 40, True)
    assert (found.layer, found.kv_head, found.samples, found.estimated) == (None, None, 240, pytest.approx(0.99))
    assert "an audit of 240 places measured 0.950 [0.950, 0.950] over all layers" in found.sentence(Policy.parse("psa"))
    assert contradiction(masses, layers, 2, 40, False) is None
    assert contradiction(masses, [LayerStats() for _ in range(3)], 2, 40, True) is None  # nothing was estimated


def test_the_way_out_fits_the_policy():
    found = Contradiction(3, 1, 4, 0.95, 20, 0.61, 0.55, 0.67)
    said = found.sentence(Policy.parse("flexprefill+psa(rank=cuboid, rest=last_max)+psaw"))
    assert "measured 0.610 [0.550, 0.670] in layer 3, KV head 1, the furthest off of 4 such KV heads" in said
    assert "what the window 'psaw' hides counts as unread" in said
    assert said.endswith("use psa(rank=keys) or another method")
    assert found.sentence(Policy.parse(SAME)).endswith("raise its bits or its margin, or use another method")


def test_the_log_has_the_first_of_a_policy_and_then_few(caplog):
    clock = [0.0]
    warnings = Warnings(lambda: clock[0])
    found = Contradiction(0, 1, 1, 0.95, 20, 0.61, 0.55, 0.67)
    one, other = Policy.parse(WRONG), Policy.parse(SPARSE)
    with caplog.at_level(logging.WARNING, "saccade.engine.watch.contradiction"):
        for _ in range(50):
            warnings.tell(found, one)
        warnings.tell(found, other)
        clock[0] = QUIET_SECONDS - 1
        warnings.tell(found, one)
        assert len(caplog.records) == 2
        clock[0] = QUIET_SECONDS
        warnings.tell(found, one)
    first, _, last = caplog.records
    assert first.levelno == logging.WARNING
    assert first.getMessage() == found.sentence(one)
    assert (first.fields["policy"], first.fields["unlogged_requests"]) == (one.text, 0)
    assert (last.fields["unlogged_requests"], last.fields["kv_head"], last.fields["mean"]) == (50, 1, 0.61)
    for number in range(3 * POLICIES):
        warnings.tell(found, Policy.parse(f"psa(epsilon=0.{number + 100})"))
    assert len(warnings._told) == POLICIES


def test_a_request_is_told_what_its_heads_truly_read(llm):
    """A whole engine beside true weights in float64 of what it read, by layer and KV head."""
    kept: dict[tuple[int, int], list[float]] = {}

    def look(call):
        if call.phase != "decode":
            return
        group = call.q.shape[0] // call.kv.kv_heads
        for head in range(call.kv.kv_heads):
            heads = slice(head * group, (head + 1) * group)
            scores = call.q[heads, 0].double() @ call.kv.keys()[head].double().T * call.spec.scale
            mask = selected_rows(call.selection, heads, torch.tensor([0]))[:, 0]
            read = (torch.softmax(scores, -1) * mask).sum(-1).mean()
            kept.setdefault((call.layer, head), []).append(float(read))

    def report(policy, **audit):
        return llm.generate(random_ids(400, 5), SamplingParams(**PARAMS, **audit), policy=policy)[0].report

    said = report(SPARSE, audit=1.0)
    with observing(llm.engine, look):
        plain = report(SPARSE)
    found, (note,) = said["audit"]["contradiction"], said["notes"]
    means = {place: sum(each) / len(each) for place, each in kept.items()}
    assert means[found["layer"], found["kv_head"]] == pytest.approx(found["mean"], abs=1e-4)
    assert found["mean"] < found["estimated"] - TOLERANCE
    assert f"in layer {found['layer']}, KV head {found['kv_head']}" in note
    assert (plain["audit"], plain["notes"]) == (None, [])  # who measures nothing knows nothing
    for policy in ("dense", SAME, "lossless(draft=psa(epsilon=0.3))"):
        said = report(policy, audit=1.0)
        assert said["audit"]["contradiction"] is None
        assert not any("estimated that" in one for one in said["notes"])


def test_places_measured_in_one_launch_go_to_their_requests_layers_and_heads(monkeypatch):
    """Two requests, two layers of unlike scale: what is measured of a place is a number that names it."""
    asked = [{0: [0, 2], 1: [1]}, {1: [2, 0], 2: [1]}]
    specs = {0: LayerAttention(0.3), 1: LayerAttention(0.7), 2: LayerAttention(0.3)}
    kv = SimpleNamespace(pool=SimpleNamespace(format=SimpleNamespace(kv_heads=4)))
    rows = [
        SimpleNamespace(scheduled=SimpleNamespace(request_id=n), result=SimpleNamespace(error=None), kv=kv)
        for n in (0, 1)
    ]
    audits = {n: RowAudit(Audit(AuditOptions(1.0), n), drawn, True) for n, drawn in enumerate(asked)}

    def named(self, tap, buffers, places, scale, softcap):
        assert {specs[layer].scale for layer, *_ in places} == {scale}
        return torch.tensor([[(1 + 16 * row + 4 * layer + head) / 64, 0.0, 0.0] for layer, row, head, _ in places])

    monkeypatch.setattr(StepAudits, "_compare", named)
    step = StepAudits(rows, audits, SimpleNamespace(specs=specs), None, SimpleNamespace(longest=9))
    step.launch()
    step.settle()
    for row, drawn in enumerate(asked):
        means = {place: one.mean for place, one in audits[row].audit.masses.items()}
        places = [(layer, head) for layer, heads in drawn.items() for head in heads]
        assert means == {(layer, head): (1 + 16 * row + 4 * layer + head) / 64 for layer, head in places}


@pytest.mark.thorough
def test_recorded_steps_are_told_of_as_those_of_the_host_are(tiny_llama, llm):
    """Places of a batch that one launch measured go to their own requests, layers and heads."""
    device = make(tiny_llama, exact=False)
    put_on_device(device)
    params = SamplingParams(**{**PARAMS, "max_tokens": 3}, audit=1.0)
    host, there = (
        one.generate([random_ids(200, 5), random_ids(190, 6)], params, policy=SPARSE) for one in (llm, device)
    )
    for ours, theirs in zip(host, there):
        assert list(theirs.report["decode"]["backends"]) == ["triton"]
        found, wanted = theirs.report["audit"]["contradiction"], ours.report["audit"]["contradiction"]
        assert wanted is not None
        assert found == pytest.approx(wanted, abs=1e-4)
    assert host[0].report["audit"]["contradiction"] != host[1].report["audit"]["contradiction"]
