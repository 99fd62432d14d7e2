"""What ``saccade tune`` tries: a ladder a method, whose rungs read less and less."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ladder:
    """Settings of one method of a ``phase``, those that read most first. The first rung that drifts too far ends it."""

    phase: str
    rungs: tuple[str, ...]


LADDERS = (
    Ladder("decode", ("psa", "psa(epsilon=0.9)", "psa(epsilon=0.8)")),
    Ladder("decode", ("lfps(k=0.25)", "lfps(k=0.1)", "lfps(k=0.05)")),
    Ladder("prefill", ("sampled_rows(threshold=0.0005)", "sampled_rows", "sampled_rows(threshold=0.005)")),
    Ladder("prefill", ("flexprefill(min_budget=256)",)),
    Ladder("decode", ("cis",)),
    Ladder("prefill", ("flashprefill(alpha=0.05)", "flashprefill")),
)
