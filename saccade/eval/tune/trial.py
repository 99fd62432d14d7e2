"""One policy tried over texts: how far it drifts from dense attention on each, and whether it may."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torch import Tensor

from saccade.eval.drift.measure import compared, run
from saccade.eval.stats import STRETCH, stretch_interval
from saccade.llm import LLM
from saccade.methods.auto import SAFE
from saccade.methods.policy import Policy
from saccade.passage import Passage

BELOW_ROUNDING = 0.03  # of tokens, that may agree fewer than bfloat16's rounding leaves
UNTRIED = 0.5  # of both bounds, for policies that were not held over other texts: these may ask for more
FEWEST = math.ceil(1 / (UNTRIED * BELOW_ROUNDING))  # forced tokens of which one is no more than may disagree
ROUNDING = 0.98  # what that is taken to leave where it is not measured


@dataclass(frozen=True)
class Tried:
    """One policy over the texts. ``kl`` in nats and its upper end (95 %), ``agree`` from 0 to 1: the worst of those
    that it ran over; ``density`` and ``seconds`` over the first, of the phase that it acts in, dense's seconds beside;
    ``why``: what speaks against it, None where nothing does. ``heads``: over the first text, by phase, layer and query
    head the share of its keys that it read."""

    policy: str
    phase: str
    kl: float
    high: float
    agree: float
    density: float
    seconds: float
    dense_seconds: float
    why: str | None
    heads: Mapping[str, list[list[float]]] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        return self.dense_seconds / self.seconds if self.seconds else 0.0

    @property
    def row(self) -> dict[str, Any]:
        """What is kept of it: all but what single heads did."""
        return {name: value for name, value in vars(self).items() if name != "heads"}


class Limits:
    """What a policy may drift by: the upper end of its KL at most ``bound``, and as many tokens agree as bfloat16's
    ``rounding`` leaves, less BELOW_ROUNDING. The safe preset, which was held over other texts on other models
    (docs/results/choosing-tables.md), may use all of that here, others UNTRIED of it: one text says little of the
    next."""

    def __init__(self, bound: float, rounding: float | None) -> None:
        self.bound, self.rounding = bound, ROUNDING if rounding is None else rounding

    def why_not(self, policy: Policy, kl: float, high: float, agree: float) -> str | None:
        """What speaks against ``policy``, whose KL in nats (its mean and upper end) and agreement these are."""
        share = 1.0 if is_safe(policy) else UNTRIED
        bound, least = share * self.bound, self.rounding - share * BELOW_ROUNDING
        if high > bound:
            return f"KL {kl:.3f}, up to {high:.3f}, above {bound:g}"
        return None if agree >= least else f"{100 * agree:.2f} % agree, fewer than {100 * least:.2f} %"


def is_safe(policy: Policy) -> bool:
    """Whether each phase is dense or the safe preset's."""
    safe = Policy.parse(SAFE)
    return all(
        one.is_dense or one == of_safe
        for one, of_safe in ((policy.prefill, safe.prefill), (policy.decode, safe.decode))
    )


@dataclass(frozen=True)
class Text:
    """A passage that policies run over, with dense attention's logits [steps, vocab] there and what it took."""

    name: str
    passage: Passage
    dense: Tensor
    base: dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """Runs policies over ``texts``, each held to the limits of its own."""

    llm: LLM
    texts: Sequence[tuple[Text, Limits]]
    seed: int

    def of(self, text: str, phase: str) -> Tried:
        """One policy, run over text after text until it is too far on one."""
        policy = Policy.parse(text)
        drifts: list[tuple[float, float, float]] = []
        first: dict[str, Any] = {}
        why = None
        for over, limits in self.texts:
            own, ran = run(self.llm, over.passage, policy, seed=self.seed, weights=False)
            first = first or ran
            found = compared(own, over.dense, over.passage)
            high = stretch_interval(found["kl"], min(STRETCH, len(found["kl"])), seed=self.seed).high
            drifts.append((fmean(found["kl"]), high, fmean(found["agree"])))
            why = limits.why_not(policy, *drifts[-1])
            if why is not None:
                why = f"{why} ({over.name})" if len(self.texts) > 1 else why
                break
        kl, highs, agree = zip(*drifts)
        seconds, beside = (one[phase]["seconds"] for one in (first, self.texts[0][0].base))
        density = first[phase]["density"] or 1.0
        return Tried(text, phase, max(kl), max(highs), min(agree), density, seconds, beside, why, first["heads"])
