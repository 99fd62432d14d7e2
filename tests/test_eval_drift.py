"""Drift from dense: numbers against transformers and brute force, and intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drift_texts import LENGTH, STEPS, STREAMING, TEXT, passage
from engine_helpers import EVERY, GREEDY, tokens
from eval_calls import make_call
from helpers import brute_force, planted_heads
from tiny_models import one_thread, oracle, oracle_logits  # noqa: F401

from saccade.engine.observing import observing_logits
from saccade.errors import RequestError
from saccade.eval.drift.kept import Kept, KeptWeight, kept_weight
from saccade.eval.drift.measure import compared, contradiction, run
from saccade.eval.stats import Interval, stretch_interval
from saccade.methods.policy import Policy
from saccade.passage import passage_of
from saccade.selection import Band, Shape


@torch.inference_mode()
def masked_logits(model, ids, context: int, sinks: int, window: int) -> torch.Tensor:
    """Logits [n, vocab] of transformers, whose rows from ``context`` on read the first and the last keys alone."""
    n = len(ids)
    rows, keys = torch.arange(n)[:, None], torch.arange(n)
    reads = (keys <= rows) & ((rows < context) | (keys < sinks) | (rows - keys < window))
    mask = torch.where(reads, 0.0, torch.finfo(torch.float32).min)[None, None]
    return model(input_ids=torch.tensor([list(ids)]), attention_mask=mask, use_cache=False).logits[0].float()


def test_drift_is_that_of_transformers_under_the_same_mask(llm, tiny_llama):
    """KL, agreement and likelihood of dense and of a policy whose reading is a mask."""
    given, model = passage(llm), oracle(tiny_llama)
    ids, context = given.ids[:-1], given.context
    dense, own = oracle_logits(model, ids)[context:], masked_logits(model, ids, context, 3, 20)[context:]
    logits, ran = run(llm, given, Policy.parse(STREAMING))
    exact, _ = run(llm, given, Policy())
    torch.testing.assert_close(exact, dense, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(logits, own, atol=2e-4, rtol=2e-4)
    found = compared(logits, exact, given)
    p, q = torch.log_softmax(dense.double(), -1), torch.log_softmax(own.double(), -1)
    assert found["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).tolist(), abs=1e-4)
    assert found["agree"] == (dense.argmax(-1) == own.argmax(-1)).double().tolist()
    nll = [-float(q[at, token]) for at, token in enumerate(given.ids[context + 1 :])]
    assert found["nll"] == pytest.approx(nll, abs=1e-3)
    assert max(found["kl"]) > 0.01
    expected = np.mean([23 / (context + at + 1) for at in range(STEPS)])
    assert ran["decode"]["density"] == pytest.approx(expected, rel=0.01)


def test_dense_drifts_by_nothing_and_keeps_all(llm):
    given = passage(llm)
    logits, ran = run(llm, given, Policy())
    assert set(compared(logits, logits, given)["kl"]) == {0.0}
    kept = ran["decode"]["kept"]
    assert (kept["mean"], kept["worst_head"]["mean"], kept["least"]["weight"]) == (1.0, 1.0, 1.0)
    assert (ran["decode"]["density"], ran["decode"]["reads"], ran["coverage_estimated"]) == (1.0, 1.0, None)


def test_oracles_drift_less_the_more_they_read(llm):
    given = passage(llm)
    dense, _ = run(llm, given, Policy())
    drifts, weights = [], []
    for text in ("topk(k=4)", "topk(k=32)", "topk(k=150)"):
        logits, ran = run(llm, given, Policy.parse(text))
        drifts.append(float(np.mean(compared(logits, dense, given)["kl"])))
        weights.append(ran["decode"]["kept"]["mean"])
    assert drifts == sorted(drifts, reverse=True)
    assert drifts[0] > drifts[-1]
    assert weights == sorted(weights)
    assert weights[0] < weights[-1] <= 1.0
    _, ran = run(llm, given, Policy.parse("topp(dense_upto=0, p=0.8)"))
    assert ran["decode"]["kept"]["least"]["weight"] >= 0.8 - 1e-5


def test_a_sparse_prefill_is_part_of_the_drift(llm):
    """Dense decode steps after it keep all, and the logits still move."""
    given = passage(llm)
    dense, _ = run(llm, given, Policy())
    logits, ran = run(llm, given, Policy.parse("prefill=streaming(sinks=2, window=16), decode=dense"))
    assert max(compared(logits, dense, given)["kl"]) > 1e-3
    assert ran["decode"]["kept"]["mean"] == 1.0
    assert ran["prefill"]["kept"]["mean"] < 1.0
    assert ran["prefill"]["density"] < 0.5


def test_logits_of_forced_tokens_are_those_of_a_run_that_nobody_looks_at(llm):
    """The seam changes no token, shows each decode row once and lets go afterwards."""
    seen: list[int] = []
    prompt = llm.encode(TEXT)[:100]
    with observing_logits(llm.engine, lambda request, position, row: seen.append(position)):
        shown = llm.generate(prompt, GREEDY)[0]
    assert seen == list(range(100, 109))
    assert tokens(shown) == tokens(llm.generate(prompt, GREEDY)[0])
    assert len(seen) == 9


def test_every_method_is_measured(llm):
    """What drifts keeps less than all, in prefill or decode, and nothing keeps more."""
    given = passage_of(TEXT, llm.encode, LENGTH, 3)
    dense, _ = run(llm, given, Policy())
    for policy in [*EVERY, Policy.parse("lossless(draft=psa(epsilon=0.3), tokens=4)")]:
        logits, ran = run(llm, given, policy)
        drift = max(compared(logits, dense, given)["kl"])
        kept = [ran[phase]["kept"]["mean"] for phase in ("prefill", "decode") if ran[phase]["kept"] is not None]
        assert all(0 < weight <= 1 for weight in kept), policy.text
        assert drift < 1e-6 or min(kept) < 1, policy.text
        assert 0 < ran["decode"]["density"] <= 1, policy.text


def test_kept_weight_is_that_of_brute_force():
    q, k, v = planted_heads(4, 2, 90, seed=3)
    band = Band(Shape.suffix(4, 2, 90, 90), window=9, sinks=2)
    rows = torch.tensor([5, 40, 89])
    shape = Shape.suffix(4, 2, 90, 90)
    _, lse = brute_force(q, k, v, band.mask()[0].expand(4, 90, 90), 0.25)
    _, whole = brute_force(q, k, v, shape.causal_mask().expand(4, 90, 90), 0.25)
    expected = torch.exp(lse - whole)[:, rows].float()
    torch.testing.assert_close(kept_weight(make_call(q, k, v, band), rows), expected, atol=1e-5, rtol=1e-4)
    assert kept_weight(make_call(q, k, v), rows).eq(1).all()


def test_layers_with_windows_of_their_own_are_left_out():
    q, k, v = planted_heads(4, 2, 90, seed=3)
    kept = KeptWeight(torch.arange(90))
    kept(make_call(q, k, v, Band(Shape.suffix(4, 2, 90, 90), window=9), window=9))
    assert kept.of("prefill") is None
    kept(make_call(q, k, v, layer=2))
    assert kept.of("prefill").as_dict()["layers"] == {"2": 1.0}


@pytest.mark.parametrize(
    ("mean", "least", "says"),
    [
        (0.95, 0.95, False),
        (0.93, 0.90, False),  # as far off as is allowed
        (0.92, 0.92, True),
        (0.99, 0.60, True),  # a single step, far off
    ],
)
def test_weights_that_contradict_a_reported_coverage_are_told(mean, least, says):
    values = torch.full((1, 100), mean + (mean - least) / 99)
    values[0, 7] = least
    said = contradiction({"mean": 0.95, "least": 0.95}, Kept({3: values}))
    assert (said is not None) == says
    if says:
        assert f"{least:.3f} at least (layer 3, head 0)" in said


def test_many_steps_below_the_least_coverage_are_told():
    values = torch.ones(2, 1000)
    values[1, :3] = 0.85
    said = contradiction({"mean": 0.95, "least": 0.95}, Kept({0: values}))
    assert said is not None
    assert "0.15 % of head-steps" in said
    values[1, 1:3] = 1.0
    assert contradiction({"mean": 0.95, "least": 0.95}, Kept({0: values})) is None


# --- intervals


def test_intervals_by_stretches_are_seeded_and_wider_where_neighbours_are_alike():
    rng = np.random.default_rng(3)
    series = np.repeat(rng.normal(size=32), 8).tolist()
    found = stretch_interval(series, 16, seed=5)
    assert found == stretch_interval(series, 16, seed=5) != stretch_interval(series, 16, seed=6)
    single = stretch_interval(series, 1, seed=5)
    assert found.mean == single.mean == pytest.approx(np.mean(series))
    assert found.high - found.low > 1.8 * (single.high - single.low)
    assert stretch_interval([2.0] * 10, 4) == Interval(2.0, 2.0, 2.0, 10)


@pytest.mark.parametrize("size", [7, 16, 20])
def test_every_draw_has_as_many_values_as_the_series(size):
    """Sums of a series of ones are its length, whatever the stretch."""
    for stretch in range(1, size + 1):
        found = stretch_interval([1.0] * size, stretch, resamples=50)
        assert (found.low, found.high) == (1.0, 1.0)


@pytest.mark.parametrize(("values", "stretch"), [([], 1), ([1.0, 2.0], 3), ([1.0], 0)])
def test_stretches_that_do_not_fit_are_refused(values, stretch):
    with pytest.raises(RequestError, match="must be"):
        stretch_interval(values, stretch)
