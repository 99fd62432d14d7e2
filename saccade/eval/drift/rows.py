"""What a table says of each policy, from the records of its run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.eval.board.entries import ENTRIES
from saccade.eval.stats import STRETCH, Interval, stretch_interval
from saccade.methods.policy import Policy

DENSE, ROUNDING = "dense", "dense, bfloat16 beside float32"  # ids of records that are no policy's own
ORACLES = frozenset(name for entry in ENTRIES if entry.kind == "oracle" for name in entry.methods)


@dataclass(frozen=True)
class Row:
    """One policy. ``kl`` in nats, ``agree`` from 0 to 1, ``nll``: by how much its mean over the text's tokens exceeds
    dense's, in nats. ``over``: ``kl`` minus that of bfloat16's rounding, token by token; None where that was not
    measured. ``reads``: keys and values read, and keys scored exactly to choose them, over what dense reads: the
    mean of prefill and decode. Block summaries are not in it."""

    id: str
    kl: Interval
    agree: Interval
    nll: Interval
    perplexity: float
    reads: float
    over: Interval | None
    oracle: bool
    record: Mapping[str, Any]


def rows_of(records: Sequence[Mapping[str, Any]], seed: int) -> list[Row]:
    """One row a record, in their order; dense's record is among them. Intervals are paired: all runs are over the same
    tokens, and the same stretches of them are drawn for all."""
    by_id = {record["id"]: record for record in records}
    dense, rounding = by_id[DENSE], by_id.get(ROUNDING)
    return [_row(record, dense, rounding, seed) for record in records]


def _row(record: Mapping[str, Any], dense: Mapping[str, Any], rounding: Mapping[str, Any] | None, seed: int) -> Row:
    stretch = min(STRETCH, len(record["kl"]))

    def interval(values: Sequence[float]) -> Interval:
        return stretch_interval(values, stretch, seed=seed)

    base = record["nll_exact"] if record is rounding else dense["nll"]
    over = None if rounding is None else [own - its for own, its in zip(record["kl"], rounding["kl"])]
    parts = [record[phase]["reads"] for phase in ("prefill", "decode") if phase in record]
    return Row(
        record["id"],
        interval(record["kl"]),
        interval(record["agree"]),
        interval([own - its for own, its in zip(record["nll"], base)]),
        math.exp(sum(record["nll"]) / len(record["nll"])),
        sum(parts) / len(parts) if parts else 1.0,
        None if over is None or record is rounding else interval(over),
        record["id"] not in (DENSE, ROUNDING) and _is_oracle(Policy.parse(record["id"])),
        record,
    )


def _is_oracle(policy: Policy) -> bool:
    return policy.prefill.name in ORACLES or policy.decode.name in ORACLES
