"""Numbers at the ends of what a float holds: an option takes them, or refuses them by its name."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import get_type_hints

import pytest
from engine_helpers import FIVE
from tiny_models import one_thread as one_thread
from tiny_models import random_ids

from saccade import SamplingParams
from saccade.engine.watch.audit import Audit, AuditOptions
from saccade.errors import PolicyError, RequestError
from saccade.methods.policy import Policy
from saccade.methods.registry import METHODS

SMALL = (5e-324, 1e-320, 2.2250738585072014e-308, 1e-300, 1e-40)
EXTREME = (*SMALL, 1 - 2**-53, 1 + 2**-52, 1e300, 1.7976931348623157e308, -5e-324)
SHORT = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
PROMPT = random_ids(40, seed=1)
OPTIONS = [(name, field.name) for name, kind in METHODS.items() for field in fields(kind) if field.init]
FLOATS = [(name, option) for name, option in OPTIONS if "float" in str(get_type_hints(METHODS[name])[option])]


def refusal(llm, policy: str, params: dict) -> str:
    """What a request is refused with, before it runs; empty where it is answered. AssertionError where it breaks."""
    try:
        output = llm.generate(PROMPT, SamplingParams(**SHORT | params), policy=Policy.parse(policy))[0]
    except (PolicyError, RequestError) as error:
        return str(error)
    assert output.error is None, (policy, params, output.error)
    json.dumps(output.report, allow_nan=False)
    return ""


@pytest.mark.parametrize("name", ["audit", "audit_steps", "target", "bounds", "temperature", "top_p", "min_p"])
def test_sampling_takes_or_refuses_them(llm, name):
    policy = {"target": "psa", "bounds": "cis"}.get(name, FIVE[1])
    refused = [refusal(llm, policy, {name: value}) for value in EXTREME]
    assert all(not said or name in said for said in refused)
    assert refused[-1].startswith(f"{name}=-5e-324 must be")


@pytest.mark.parametrize("value", EXTREME[:2] + EXTREME[-2:])
def test_policies_take_or_refuse_them(llm, value):
    assert len(FLOATS) > 30
    needs = {"infinigen": ", skew=off"}  # calibrated otherwise
    for name, option in FLOATS:
        said = refusal(llm, f"{name}({option}={value!r}{needs.get(name, '')})", {})
        assert not said or option in said, (name, option, said)


@pytest.mark.parametrize("rate", SMALL)
def test_a_rate_that_no_quotient_holds_draws_nothing(rate):
    audit = Audit(AuditOptions(rate), seed=3)
    assert all(audit.draw(position, 32, 8) == {} for position in (0, 1, 10_000, 2**31))
    assert audit.places == 4 * 32 * 8
