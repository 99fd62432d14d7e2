"""A target of agreement: the dial goes up at once and down slowly, holds, and says how long a drift took."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import make, tokens
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.watch.control import GAIN, PLACES, TargetControl
from saccade.errors import RequestError
from saccade.methods.policy import Policy, parse_method

DIALS = {
    "psa(epsilon=0.5)": "epsilon",
    "topp(dense_upto=0, p=0.5)": "p",
    "quest(budget=64)": "budget",
    "arkvale(budget=64)": "budget",
    "topk(k=0.05)": "k",
    "topk(k=16)": "k",
    "streaming(sinks=2, window=32)": "window",
}


def windows(agrees: torch.Tensor, size: int) -> torch.Tensor:
    """Share that agrees in every ``size`` steps in a row."""
    sums = torch.nn.functional.pad(agrees.double().cumsum(0), (1, 0))
    return (sums[size:] - sums[:-size]) / size


@pytest.mark.parametrize("text", DIALS)
def test_a_dial_reads_more_and_more_and_at_its_end_everything(text):
    method = parse_method(text)
    assert method.dial is not None
    assert method.dial.option == DIALS[text]
    values = [getattr(method.dial.turned(method, place / 8, 4096), method.dial.option) for place in range(9)]
    keys = [
        value * 4096 if isinstance(value, float) and value < 1 and DIALS[text] == "k" else value for value in values
    ]
    assert keys == sorted(keys)
    assert values[0] == getattr(method, DIALS[text])
    assert keys[-1] >= 4096 or values[-1] == 1.0
    assert parse_method(method.dial.turned(method, 0.5, 4096).text) == method.dial.turned(method, 0.5, 4096)


def drift(seed: int, target: float, steps: int = 24000) -> tuple[torch.Tensor, torch.Tensor, TargetControl]:
    """Misses come with a chance that falls as the dial rises, and doubles half-way."""
    rng = torch.Generator().manual_seed(seed)
    control = TargetControl(parse_method("psa(epsilon=0.3)"), target, 4096)
    agreed, places = torch.zeros(steps, dtype=torch.bool), torch.zeros(steps)
    for step, luck in enumerate(torch.rand(steps, generator=rng).tolist()):
        hardness = 0.15 if step < steps // 2 else 0.30
        place = min(1.0, -int(-control.place * PLACES // 1) / PLACES)
        agreed[step], places[step] = luck >= hardness * (1 - place) ** 2, place
        control.observe(bool(agreed[step]))
    return agreed, places, control


@pytest.mark.parametrize("target", [0.9, 0.98])
def test_agreement_is_held_within_a_hundredth_while_difficulty_doubles(target):
    for seed in range(3):
        agreed, places, control = drift(seed, target)
        held = windows(agreed, 3000)
        assert held.min() >= target - 0.01  # also in the windows around the change, and from the first step on
        settled = held[1000:]
        assert settled.max() <= target + 0.01
        late = places[-6000:]  # no oscillation: the dial stays near where misses are as many as they may be
        assert late.std() < 0.1
        told = control.as_dict()
        assert told["agreement"]["mean"] == pytest.approx(float(agreed[-3000:].double().mean()), abs=1e-6)
        assert told["audited_steps"] == len(agreed)
        assert not told["drifting"]


def test_whatever_comes_few_steps_disagree():
    """An adversary who disagrees whenever it can: at the end of the dial it cannot."""
    control, missed = TargetControl(parse_method("topk(k=16)"), 0.98, 4096), []
    for _ in range(9000):
        missed.append(control.method != control.dial.turned(control.asked, 1.0, 4096))
        control.observe(not missed[-1])
    assert windows(torch.tensor(missed), 3000).max() <= 0.02 + (1 + GAIN) / (GAIN * 3000) <= 0.0297


def test_up_at_once_down_slowly_and_how_long_a_drift_took():
    control = TargetControl(parse_method("psa(epsilon=0.3)"), 0.98, 4096)
    for _ in range(200):
        control.observe(True)
    assert control.place == 0
    assert control.method is control.asked
    control.observe(False)
    assert control.place == pytest.approx(GAIN * 0.98)
    assert control.method.epsilon > 0.3
    up = control.place
    control.observe(True)
    assert 0 < up - control.place < up / 40
    for _ in range(20):
        control.observe(False)
    assert control.as_dict()["drifting"]
    for _ in range(400):
        control.observe(True)
    assert not control.as_dict()["drifting"]
    assert 150 < control.last_drift < 300


def test_requests_share_what_they_taught_and_end_near_dense(tiny_llama):
    llm = make(tiny_llama)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, target=0.97, audit_steps=1.0, seed=1)
    first, second = (llm.generate(random_ids(230, at), params, policy="topk(k=8)")[0].report for at in (1, 2))
    assert first["audit"]["target"]["audited_steps"] == 59
    assert second["audit"]["target"]["audited_steps"] == 118
    assert second["decode"]["density"] > first["decode"]["density"]
    assert first["decode"]["policy"] == "topk(k=8)"
    dense = llm.generate(random_ids(230, 1), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0]
    control = llm.engine.auditing.controls.of(Policy.parse("topk(k=8)").decode, 0.97)
    control.place = 1.0
    again = llm.generate(random_ids(230, 1), params, policy="topk(k=8)")[0]
    assert tokens(again) == tokens(dense)


def test_a_method_without_a_dial_is_refused(tiny_llama):
    llm = make(tiny_llama)
    with pytest.raises(RequestError, match=r"target=0.9: 'cis' has no dial .* psa"):
        llm.generate(random_ids(20, 1), SamplingParams(target=0.9), policy="cis")
    with pytest.raises(RequestError, match="'dense' has no dial"):
        llm.generate(random_ids(20, 1), SamplingParams(target=0.9))
    other = make(tiny_llama, target=0.9)  # of the engine: where there is a dial
    assert other.generate(random_ids(20, 1), policy="cis")[0].report["audit"] is None
    assert other.generate(random_ids(20, 1), policy="psa")[0].report["audit"]["target"]["option"] == "epsilon"
