"""What ran in one phase of a request: counts by layer, from work done."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from saccade.engine.steps.paths import Path
from saccade.engine.steps.step import RequestResult
from saccade.engine.watch.device_counts import DeviceCounts, selection_kind
from saccade.engine.watch.layer_stats import LayerStats
from saccade.kv.tier import TierCounts
from saccade.selection import Dense

SLIDES = "sliding-window layers ran their own window instead of the policy"  # a note of reports


class Late(Protocol):
    """Counts that are kept elsewhere while a request runs."""

    def take(self) -> DeviceCounts:
        """What was counted since the last time."""
        ...


@dataclass
class PhaseStats:
    """One phase (prefill or decode) of one request."""

    layers: list[LayerStats]
    policies: list[str] = field(default_factory=list)  # method texts that were asked for, in order of first use
    kinds: dict[str, int] = field(default_factory=dict)  # selection kind -> calls
    backends: dict[str, int] = field(default_factory=dict)
    paths: dict[Path, int] = field(default_factory=dict)  # -> rows
    tokens: int = 0
    seconds: float = 0.0
    late: dict[Any, Late] = field(default_factory=dict)  # what is counted elsewhere until it is asked for
    moved: TierCounts | None = None  # by tiers of other processes, as far as they were asked
    step_bytes: int | None = None  # of keys and values that the last step asked for there
    sparse_elsewhere: int = 0  # see DeviceCounts

    def take(self, result: RequestResult, method: str, tokens: int, seconds: float) -> None:
        """Count what a step did in ``seconds`` under ``method`` (its text) for ``tokens`` rows."""
        if method not in self.policies:
            self.policies.append(method)
        self.tokens += tokens
        self.seconds += seconds
        for call in result.calls:
            self.layers[call.layer].add(call)
            kind = selection_kind(call.used)
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            self.backends[call.backend] = self.backends.get(call.backend, 0) + 1
        for skip in result.skips:
            self.layers[skip.layer].skip(skip.frozen, skip.pairs, skip.unread)
        self.late.update(result.late)
        if result.path is not None:
            self.paths[result.path] = self.paths.get(result.path, 0) + tokens

    def _add_late(self, counts: DeviceCounts) -> None:
        self.moved, self.step_bytes = counts.tiers or self.moved, counts.step_bytes or self.step_bytes
        self.sparse_elsewhere += counts.sparse_elsewhere
        for layer, stats in counts.layers.items():
            self.layers[layer].plus(stats)
        for have, more in ((self.kinds, counts.kinds), (self.backends, counts.backends)):
            for name, calls in more.items():
                have[name] = have.get(name, 0) + calls

    def _certified(self) -> dict[str, Any] | None:
        """(Query head, step) pairs that were certified, by what gave the bound; None where nothing asked for it. Where
        keys and values are rounded, ``rounding`` is what that adds at most (ops.rounding)."""
        layers = [layer.certified for layer in self.layers if layer.certified]
        if not layers:
            return None
        counts = {name: sum(layer.get(name, 0) for layer in layers) for name in ("bounds", "sample", "exact")}
        rounding = [layer.rounding for layer in self.layers if layer.rounding is not None]
        return {"heads": sum(counts.values()), **counts, **({"rounding": max(rounding)} if rounding else {})}

    def settle(self) -> None:
        """Take over what was counted elsewhere since the last time."""
        for late in self.late.values():
            self._add_late(late.take())
        for layer in self.layers:
            layer.settle()

    def copied(self) -> PhaseStats:
        """What was counted so far, for a request that goes on from here on its own."""
        self.settle()
        return copy.deepcopy(replace(self, late={}))  # which native code holds

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Densities are attended over causal pairs, in ``density`` of all layers together; keys
        are per query head and row."""
        self.settle()
        active = [layer for layer in self.layers if layer.causal]
        heads = max((layer.heads for layer in active if layer.calls), default=1)
        for layer in active:
            layer.heads = layer.heads if layer.calls else heads  # a freeze skipped every row
        shares = [layer.shares() for layer in active]
        rows = max(1, self.tokens) * max(1, len(active))
        searches, searchable = (sum(getattr(one, name) for one in active) for name in ("searches", "searchable"))
        estimates = sum(layer.estimates for layer in active)
        attended = sum(mean for mean, _ in shares)
        causal = sum(layer.causal for layer in active)
        rate = self.tokens and self.seconds > 0
        return {
            "policy": "+".join(self.policies) if self.policies else None,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 6),
            "tokens_per_second": round(self.tokens / self.seconds, 3) if rate else None,
            "density": attended / causal if causal else None,
            "keys_attended": round(attended),
            "keys_causal": causal,
            "keys_scored": sum(layer.scored for layer in active),
            "keys_estimated": sum(layer.estimated for layer in active),
            "keys_attended_per_row": round(attended / rows, 2),
            "rows_frozen": sum(layer.frozen for layer in self.layers),
            "rows_frozen_per_layer": [layer.frozen for layer in self.layers],
            "rows_unread": sum(layer.unread for layer in self.layers),
            "retrievals": sum(layer.retrievals for layer in active),
            "searches": searches,
            "searchable": searchable,
            "search_ratio": searches / searchable if searchable else None,
            "coverage_estimated": sum(layer.covered for layer in active) / estimates if estimates else None,
            "coverage_estimated_least": min(layer.least_covered for layer in active) if estimates else None,
            "certified": self._certified(),
            "density_per_layer": [round(mean / layer.causal, 6) for layer, (mean, _) in zip(active, shares)],
            "density_per_head": [heads for _, heads in shares],
            "selections": dict(self.kinds),
            "backends": dict(self.backends),
            "paths": [{"path": path.name, "rows": rows, "why": path.why} for path, rows in self.paths.items()],
        }


RAN_DENSE = "ran dense where its settings or a short context leave nothing to skip"


def ran_dense(phase: str, method: str) -> str:
    """The note of a method that chose nothing."""
    return f"{phase}: '{method}' {RAN_DENSE}"


def holds(note: str, phase: str, stats: PhaseStats) -> bool:
    """Whether a ``note`` holds of all heads: in another process, whose heads chose something in the same calls, none
    of ``phase`` may have run dense."""
    of_dense = note.startswith(f"{phase}: ") and note.endswith(RAN_DENSE)
    return not of_dense or not stats.sparse_elsewhere or Dense.__name__.lower() in stats.kinds
