"""Which policy a table of drifts recommends, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.eval.drift.rows import DENSE, ROUNDING, Row
from saccade.eval.stats import Interval

BOUND = 0.02  # nats; by Pinsker's inequality at most sqrt(0.02 / 2) = 0.1 of the probability moves, on average


@dataclass(frozen=True)
class Advice:
    """``policy``: the recommended one; None where none can be. ``within``: ``rounding``, ``bound`` or None."""

    policy: str | None
    within: str | None
    reason: str


def recommend(rows: Sequence[Row], bound: float = BOUND) -> Advice:
    """The policy that reads least of those whose drift lies within what bfloat16's rounding costs: the upper end of the
    interval of KL minus the rounding's, paired, is not above 0. Where there is none, of those whose drift lies within
    ``bound`` nats: the upper end of KL's own interval. Dense, oracles, and policies that read no less than dense are
    never recommended."""
    usable = [row for row in rows if row.id not in (DENSE, ROUNDING) and not row.oracle and row.reads < 1]
    rounding = next((row for row in rows if row.id == ROUNDING), None)
    if not usable:
        return Advice(None, None, "Stay with dense: no policy of the table reads less and is more than an oracle.")
    rounded = [row for row in usable if row.over is not None and row.over.high <= 0]
    bounded = [row for row in usable if row.kl.high <= bound]
    if rounded:
        cost = "" if rounding is None else f" ({rounding.kl.mean:.2g} nats)"
        best, within, what = _sparsest(rounded), "rounding", f"what the rounding of bfloat16 costs{cost}"
        before = ""
    elif bounded:
        best, within, what = _sparsest(bounded), "bound", f"{bound:g} nats"
        before = f"{_none_within(rounding)}. "
    else:
        nearest = min(usable, key=lambda row: row.kl.high)
        return Advice(
            None,
            None,
            f"Stay with dense. {_none_within(rounding)}, and no policy's within {bound:g} nats: {nearest.id} comes "
            f"nearest with {said(nearest.kl)} nats.",
        )
    kept = best.record["decode"]["kept"]
    weight = "" if kept is None else f" It keeps {kept['mean']:.3f} of the true weight, its worst head {_worst(kept)}."
    doubt = " Its own estimate of what it covers is contradicted (above)." if best.record["contradiction"] else ""
    return Advice(
        best.id,
        within,
        f"{best.id}. {before}{len(rounded or bounded)} of {len(usable)} policies drift by no more than {what}; "
        f"of these it reads least: {100 * best.record['decode']['reads']:.1f} % of what dense reads in decode, "
        f"{100 * best.record['prefill']['reads']:.1f} % in prefill. Its KL is {said(best.kl)} nats.{weight}{doubt}",
    )


def said(interval: Interval) -> str:
    """``mean [low, high]`` for readers."""
    return f"{interval.mean:.2g} [{interval.low:.2g}, {interval.high:.2g}]"


def _sparsest(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: (row.reads, row.kl.mean))


def _none_within(rounding: Row | None) -> str:
    if rounding is None:
        return "The rounding of bfloat16 was not measured"
    return f"No policy's drift lies within what the rounding of bfloat16 costs ({rounding.kl.mean:.2g} nats)"


def _worst(kept: dict[str, dict[str, float]]) -> str:
    return f"{kept['worst_head']['mean']:.3f}"
