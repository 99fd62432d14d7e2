"""What batched decode steps read, counted a request at a time and put into its report when that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from saccade.engine.batched_plan import BestBlocks, Plan, Reading
from saccade.engine.report import Report, ran_dense


@dataclass
class _Counts:
    calls: int = 0
    keys: int = 0
    estimated: int = 0
    retrievals: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


class Tally:
    """Counts of one request under one plan. ``extra`` int64 [layers, kv_heads]: keys that a rule let it read beyond
    those known for certain."""

    def __init__(self, report: Report, plan: Plan, heads: int) -> None:
        self.report, self.plan, self.heads = report, plan, heads
        self.extra: Tensor | None = None
        self.row: int | None = None  # of the step's buffers, where more may be counted
        self.source: Callable[[], None] | None = None  # gathers that
        self._causal = 0
        self._counts: dict[Reading, _Counts] = {one: _Counts() for one in set(plan.layers)}

    def add(self, length: int) -> None:
        """Count one row that sees ``length`` keys."""
        self._causal += length
        for reading, counts in self._counts.items():
            kind, keys, estimated = reading.counts(length)
            counts.calls += 1
            counts.keys += keys
            counts.estimated += estimated
            counts.retrievals += estimated > 0
            counts.kinds[kind] = counts.kinds.get(kind, 0) + 1
            if kind == "dense" and self.plan.method != "dense":
                self.report.note(ran_dense("decode", self.plan.method))

    def gather(self, read: Tensor) -> None:
        """Take ``read``, as ``extra`` is counted, and set it to 0 where it is."""
        self.extra = read.clone() if self.extra is None else self.extra + read
        read.zero_()

    def settle(self) -> None:
        """Move what was counted into the report."""
        if self.source is not None:
            self.source()
        stats = self.report.decode
        for number, reading in enumerate(self.plan.layers):
            counts, layer = self._counts[reading], stats.layers[number]
            if not counts.calls:
                continue
            extra = self.extra[number] if self.extra is not None and isinstance(reading, BestBlocks) else None
            layer.add_counts(
                counts.calls, self._causal, counts.keys, extra, self.heads, counts.estimated, counts.retrievals
            )
            for kind, calls in counts.kinds.items():
                stats.kinds[kind] = stats.kinds.get(kind, 0) + calls
            stats.backends["triton"] = stats.backends.get("triton", 0) + counts.calls
        self.extra, self._causal = None, 0
        self._counts = {one: _Counts() for one in self._counts}
