"""One request under ``lossless``: what drives its drafts, and what its report says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from saccade.engine.drafts.lookup import Lookup
from saccade.engine.drafts.pacing import Pace, Pacing
from saccade.engine.sampling.acceptance import Proposal, propose
from saccade.engine.sampling.sampler import Sampler
from saccade.engine.steps.carried import Weighed
from saccade.engine.watch.layer_stats import LayerStats
from saccade.engine.watch.phase_stats import PhaseStats
from saccade.methods.verified import Verified


@dataclass
class Speculated:
    """What was drafted and verified. ``draft``: what the draft's own rows read; the phase ``decode`` has what dense
    rows read whose tokens came of it, plain ones and verified ones."""

    draft: PhaseStats
    rounds: int = 0
    drafted: int = 0  # by the draft's own steps
    looked_up: int = 0
    accepted: int = 0
    accepted_looked_up: int = 0
    verified_rows: int = 0
    verify_seconds: float = 0.0
    plain_steps: int = 0
    plain_seconds: float = 0.0

    def as_dict(self, pace: Pace) -> dict[str, Any]:
        """Plain data for JSON."""
        tests = self.drafted + self.looked_up
        stays = pace.chance.stayed / pace.chance.tests if pace.chance.tests else None
        return {
            "verifications": self.rounds,
            "drafted": self.drafted,
            "looked_up": self.looked_up,
            "accepted": self.accepted,
            "accepted_looked_up": self.accepted_looked_up,
            "rejected": tests - self.accepted - self.accepted_looked_up,
            "acceptance": None if stays is None else round(stays, 4),
            "verified_rows": self.verified_rows,
            "draft_steps": self.draft.tokens,
            "draft_seconds": round(self.draft.seconds, 6),
            "verify_seconds": round(self.verify_seconds, 6),
            "plain_steps": self.plain_steps,
            "plain_seconds": round(self.plain_seconds, 6),
            "stops": pace.stops,
            "off": pace.off,
            "draft": self.draft.as_dict(),
        }


class Speculation:
    """The drafts of one request, whose answer has ``most`` tokens at most. ``proposals``: what stands at places of the
    sequence that a draft drew for, where the rule of ``acceptance`` is to decide; other guesses stay if the request's
    own sampler draws them too."""

    def __init__(
        self,
        method: Verified,
        sampler: Sampler,
        pacing: Pacing,
        layers: int,
        on_device: bool = False,
        most: float = math.inf,
    ) -> None:
        self.method = method
        self.pace = Pace(pacing, method.draft.text, method.tokens, most, method.draft.begins_at_once)
        self.lookup = Lookup(method.lookup)
        self.sampler = sampler.drafting()
        # A seed promises an answer: it keeps its own draws, which no draft may change. So do all where a device chooses
        # tokens: the rule wants both distributions, which the device would have to hand over for every token.
        self.on_device = on_device
        self.by_rule = not sampler.params.greedy and sampler.params.seed is None and not on_device
        self.proposals: dict[int, Proposal] = {}
        self.weighed: Weighed | None = None  # what the last step's rows saw, if it verified and says so
        self.found = 0  # of the drafts under verification, those that were looked up
        self.stats = Speculated(PhaseStats([LayerStats() for _ in range(layers)]))

    def guess(self, ids: list[int], logits: Any) -> Proposal:
        """The draft's token after ``ids`` from its ``logits`` fp32 [vocab]."""
        sampler, position = self.sampler, len(ids)
        if not self.by_rule:
            return Proposal(sampler.sample(ids, logits, position))
        return propose(sampler.weights(ids, logits), sampler.seed, sampler.params.sample, position)

    def took(self, drafts: int, stayed: int) -> None:
        """A verification of ``drafts`` tokens kept the first ``stayed``."""
        stats, found = self.stats, self.found
        drafted = drafts - found
        stats.rounds += 1
        stats.drafted, stats.looked_up = stats.drafted + drafted, stats.looked_up + found
        stats.accepted += min(stayed, drafted)
        stats.accepted_looked_up += max(0, stayed - drafted)
        stats.verified_rows += drafted + found + 1
        self.pace.took(drafted, found, stayed)
        self.proposals.clear()

    def as_dict(self) -> dict[str, Any]:
        return self.stats.as_dict(self.pace)


@dataclass
class Drafts:
    """What a round brought: ``tokens``, of which the last ``found`` were looked up."""

    tokens: list[int] = field(default_factory=list)
    found: int = 0
