"""What an answer cost, in OpenAI's form and in our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.engine.messages import RequestOutcome
from saccade.engine.watch.bounds import joined
from saccade.engine.watch.estimates import Mean, Share
from saccade.models.tokenizer import Tokenizer

JSON = dict[str, Any]


def counts(prompt: int, answer: int, cached: int = 0) -> JSON:
    """Tokens alone, which are known while an answer runs."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage(outcomes: Sequence[RequestOutcome], prompt: int, answer: int, samples: int, policy: str) -> JSON:
    """Of all choices of a request: ``samples`` for each prompt, of which the first computed it. ``prompt``, ``answer``:
    their tokens."""
    reports = [one.report for one in outcomes]
    cached = sum(report["cached_tokens"] for report in reports[::samples])
    return {**counts(prompt, answer, cached), "saccade": costs(reports, policy)}


def thought_tokens(tokenizer: Tokenizer, thoughts: str, answer: int) -> int:
    """How many of the ``answer`` tokens were ``thoughts``, their text read again."""
    return min(answer, len(tokenizer.encode(thoughts, add_special_tokens=False))) if thoughts else 0


def costs(reports: Sequence[JSON], policy: str) -> JSON:
    """``policy``: what ran, where one ran for all samples; ``policy_asked``: the name that it was asked for by.
    ``density``: keys read over keys that dense attention reads; ``keys_read_per_token``: by a query head, a layer;
    ``coverage_estimated``: the share of the weight that stopping rules estimated as read, null where none ran. Each by
    phase, null for one that did not run. ``certified``: (head, step) pairs whose error has a bound, ``audit``: what
    audits found, ``bounds``: what PrHS's certificates said; null without any.
    """
    phases: dict[str, JSON] = {"density": {}, "keys_read_per_token": {}, "coverage_estimated": {}}
    for phase in ("prefill", "decode"):
        ran = [report[phase] for report in reports if report[phase]["tokens"]]
        active = [one for one in ran if one["density"] is not None]
        causal = sum(one["keys_causal"] for one in active)
        tokens = sum(one["tokens"] for one in ran)
        covered = [one for one in ran if one["coverage_estimated"] is not None]
        weight = sum(one["tokens"] for one in covered)
        phases["density"][phase] = (
            sum(one["density"] * one["keys_causal"] for one in active) / causal if causal else None
        )
        phases["keys_read_per_token"][phase] = (
            round(sum(one["keys_attended_per_row"] * one["tokens"] for one in ran) / tokens, 2) if tokens else None
        )
        phases["coverage_estimated"][phase] = (
            sum(one["coverage_estimated"] * one["tokens"] for one in covered) / weight if weight else None
        )
    audits = [report["audit"] for report in reports if report["audit"] is not None]
    notes = list(dict.fromkeys(note for report in reports for note in report["notes"]))
    bounds = [report["bounds"] for report in reports if report["bounds"] is not None]
    sure = [one for report in reports if (one := report["decode"]["certified"]) is not None]
    policies = {report["policy"] for report in reports}
    certified = (
        {name: (max if name == "rounding" else sum)(one[name] for one in sure) for name in sure[0]} if sure else None
    )
    return {
        "policy": policies.pop() if len(policies) == 1 else policy,
        "policy_asked": policy,
        **phases,
        "certified": certified,
        "audit": audited(audits) if audits else None,
        "bounds": joined(bounds) if bounds else None,
        "notes": notes,
    }


def audited(audits: Sequence[JSON]) -> JSON:
    """What audits of several samples found, as of one (docs/audit.md). A target is told of as the last one left it;
    ``contradiction`` is the worst one."""
    means = ("retained_mass", "output_error", "output_error_scaled", "divergence")
    whole, agreement = {name: Mean() for name in means}, Share()
    for one in audits:
        agreement.join(one["agreement"])
        for name, mean in whole.items():
            mean.join(one[name])
    counts = {name: sum(one[name] for one in audits) for name in ("places", "left_out", "steps")}
    estimates = {name: mean.as_dict() for name, mean in whole.items()}
    contradictions = [one["contradiction"] for one in audits if one["contradiction"] is not None]
    worst = max(contradictions, key=lambda one: one["estimated"] - one["mean"], default=None)
    return {**audits[-1], **counts, **estimates, "agreement": agreement.as_dict(), "contradiction": worst}
