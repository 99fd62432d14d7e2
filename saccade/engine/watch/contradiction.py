"""Where an audit contradicts what a stopping rule estimates (docs/audit.md#estimates-that-an-audit-contradicts).

A progressive method stops once it estimates that the keys read so far hold enough of the attention weight. An audit
measures the true weight of the keys that were read, in a sample of the rows. The estimate is contradicted where even
the upper end of the measured mean's interval lies more than ``TOLERANCE`` below it: for a KV head (a layer, where one
rule serves all its KV heads) below the least estimate of that layer, or for all such layers below the mean estimate.
All heads are tried, so each one's interval has its part of the error alone (Bonferroni).
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from saccade.engine.watch.estimates import CONFIDENCE, DIGITS, Mean
from saccade.engine.watch.layer_stats import LayerStats
from saccade.methods.policy import Policy

logger = logging.getLogger(__name__)

TOLERANCE = 0.02  # of a share of the weight, below which an estimate may lie above the truth
QUIET_SECONDS = 600.0  # between two warnings in the log about one policy
POLICIES = 64  # whose last warning is remembered
# Held on every model that it was measured on (docs/real-models.md).
INSTEAD = "psa(rank=keys)"


@dataclass(frozen=True)
class Contradiction:
    """``estimated``: the share of the weight that the rule estimated as read, beside the measured ``mean`` of
    ``samples`` places and its interval from ``low`` to ``high``, in ``layer`` and ``kv_head``; None: in all of them.
    ``heads``: how many KV heads (or layers, where ``kv_head`` is None) are contradicted, this one the most; 0 where
    only all of them together are."""

    layer: int | None
    kv_head: int | None
    heads: int
    estimated: float
    samples: int
    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            name: round(value, DIGITS) if isinstance(value, float) else value for name, value in asdict(self).items()
        }

    def sentence(self, policy: Policy) -> str:
        """The note of a request that ran under ``policy``, with a way out."""
        where = "over all layers and heads"
        if self.layer is not None:
            where = f"in layer {self.layer}" + ("" if self.kv_head is None else f", KV head {self.kv_head}")
        if self.heads > 1:
            kind = "layers" if self.kv_head is None else "KV heads"
            where += f", the furthest off of {self.heads} such {kind}"
        unit = "places" if self.kv_head is None else "rows"
        hidden = "" if policy.window is None else f"; what the window '{policy.window.name}' hides counts as unread"
        return (
            f"{policy.decode.name} estimated that {self.estimated:.3f} of the attention weight was read; an audit of "
            f"{self.samples} {unit} measured {self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] {where}{hidden}: "
            f"{_way_out(policy)}"
        )


def contradiction(
    measured: Mapping[tuple[int, int], Mean], layers: Sequence[LayerStats], kv_heads: int, rows: int, whole: bool
) -> Contradiction | None:
    """What of the estimates in ``layers`` the true weights ``measured`` by (layer, KV head) contradict most; None where
    nothing is. ``rows``: how many decode rows might have been audited; ``whole``: nothing drawn was left out."""
    ruled = {number: one for number, one in enumerate(layers) if one.estimates}
    parts: dict[tuple[int, int | None], Mean] = {}
    for (layer, head), mean in measured.items():
        if layer in ruled:
            # The estimate of a rule that serves several KV heads may be their mean: it says nothing of a single one.
            key = layer, head if ruled[layer].units >= kv_heads else None
            parts.setdefault(key, Mean()).merge(mean)
    if not parts:
        return None
    confidence = 1 - (1 - CONFIDENCE) / (len(ruled) * kv_heads)
    found = []
    for (layer, unit), mean in parts.items():
        population = rows * (kv_heads if unit is None else 1)
        one = _beside((layer, unit), ruled[layer].least_covered, mean, population, confidence)
        if one is not None:
            found.append(one)
    if found:
        worst = max(found, key=lambda one: one.estimated - one.mean)
        return replace(worst, heads=len(found))
    if not whole:  # what was left out is no random part, and the mean estimate is over everything
        return None
    every = Mean()
    for mean in parts.values():
        every.merge(mean)
    estimated = sum(one.covered for one in ruled.values()) / sum(one.estimates for one in ruled.values())
    return _beside((None, None), estimated, every, rows * kv_heads * len(ruled), CONFIDENCE)


def _beside(
    place: tuple[int | None, int | None], estimated: float, mean: Mean, population: int, confidence: float
) -> Contradiction | None:
    """Of a measured mean whose interval lies below what is estimated at ``place`` (layer, KV head); None of others."""
    if mean.mean >= estimated - TOLERANCE:  # nearly always: no interval is worth its time
        return None
    low, high = mean.bounds(population, confidence)
    if high >= estimated - TOLERANCE:
        return None
    return Contradiction(*place, 0, estimated, mean.samples, mean.mean, low, high)


def _way_out(policy: Policy) -> str:
    decode = policy.decode
    if decode.name == "psa" and (getattr(decode, "rank", None), getattr(decode, "rule", None)) == ("keys", "estimate"):
        return "raise its bits or its margin, or use another method"
    return f"use {INSTEAD} or another method"


class Warnings:
    """Writes contradictions to the log: the first of a policy, then one every ``QUIET_SECONDS``. ``now``: a clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._told: OrderedDict[str, tuple[float, int]] = OrderedDict()  # when last, and how many requests since

    def tell(self, found: Contradiction, policy: Policy) -> None:
        """A request under ``policy`` has ended."""
        last, quiet = self._told.get(policy.text, (-math.inf, 0))
        now = self._now()
        if now - last < QUIET_SECONDS:
            self._told[policy.text] = last, quiet + 1
            return
        self._told[policy.text] = now, 0
        self._told.move_to_end(policy.text)
        while len(self._told) > POLICIES:
            self._told.popitem(last=False)
        fields = {"policy": policy.text, "unlogged_requests": quiet, **found.as_dict()}
        logger.warning("%s", found.sentence(policy), extra={"fields": fields})
