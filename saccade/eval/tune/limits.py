"""What a policy may drift by on a checkpoint before tuning leaves it out."""

from __future__ import annotations

from saccade.methods.auto import SAFE
from saccade.methods.policy import Policy

BELOW_ROUNDING = 0.03  # of tokens, that may agree fewer than bfloat16's rounding leaves
UNTRIED = 0.5  # of both bounds, for policies that were not held over other texts: these may ask for more
ROUNDING = 0.98  # what that is taken to leave where it is not measured


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
