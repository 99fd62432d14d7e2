"""Speculative sampling's rule: a token that a draft drew stays, or another is drawn, so that the target's distribution
is kept whatever the draft's (Leviathan et al., ICML 2023, algorithm 1 and appendix A.1; Chen et al., arXiv:2302.01318).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.randomness import uniform

# Draws at one place that must not hang together: the draft's, whether its token stays, and the one in its stead. The
# seed's own draw at a place belongs to tokens that were not drafted.
DRAFTED, KEPT, INSTEAD = 0x1B56C4E9A3D1F207, 0x2545F4914F6CDD1D, 0x3C6EF372FE94F82B


class Proposal(NamedTuple):
    """``token``, drawn from ``weights`` float64 [vocab] that sum to 1; None: it was certain."""

    token: int
    weights: Tensor | None = None


def draw(weights: Tensor, at: float) -> int:
    """The token at ``at`` (of [0, 1)) of the whole weight: ``weights`` float64 [vocab], not negative, not all 0."""
    cumulative = weights.cumsum(-1)
    return int(torch.searchsorted(cumulative, at * cumulative[-1], right=True).clamp(max=weights.numel() - 1))


def propose(weights: Tensor, seed: int, sample: int, position: int) -> Proposal:
    """A token for ``position`` of the draft's ``weights``, float64 [vocab] that sum to 1."""
    return Proposal(draw(weights, uniform(seed ^ DRAFTED, sample, position)), weights)


def decided(proposal: Proposal, weights: Tensor, seed: int, sample: int, position: int) -> int:
    """The token at ``position`` under the target's ``weights``, float64 [vocab] that sum to 1: the proposed one with
    probability min(1, p / q), else one of max(0, p - q)."""
    token, drafted = proposal
    sure = 1.0 if drafted is None else float(drafted[token])
    if uniform(seed ^ KEPT, sample, position) * sure < float(weights[token]):
        return token
    if drafted is None:
        left = weights.clone()
        left[token] = 0.0
    else:
        left = (weights - drafted).clamp(min=0.0)
    if not float(left.sum()) > 0.0:  # unequal by rounding alone
        left = weights
    return draw(left, uniform(seed ^ INSTEAD, sample, position))
