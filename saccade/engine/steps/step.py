"""What passes between the scheduler and the worker that runs a step: plain data, no live request.

The scheduler makes a :class:`StepInput`, a worker runs it and returns a :class:`StepResult`; the engine alone turns
results into tokens, reports and finished requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.steps.carried import Weighed
from saccade.engine.steps.paths import Path
from saccade.engine.steps.row_sampling import RowSampling
from saccade.kv.tier import TierCounts
from saccade.methods.base import Cost
from saccade.methods.policy import Policy
from saccade.ops.pairs import pairs
from saccade.selection import Band, Dense, Selection, Shape

LogprobEntries = dict[int, tuple[float, int]]  # token -> (log-probability, rank)


class ScheduledRequest(NamedTuple):
    """Rows ``start .. stop - 1`` of one sequence, for one request.

    A prefill runs rows of the span ``span_start .. span_stop - 1``; ``span_length`` is the context's length when that
    span was begun, which freezing counts from and which stays when the span is cut short. ``after_cut``: the prefill
    goes on where tokens were cut off, so older method states saw what is gone.

    A decode step has one row, and one more for each of ``drafts``, the tokens that may follow: each row sees the keys
    up to its own. A worker takes them row by row (:meth:`apart`); ``row`` is then the row's number among them.
    ``together``: they are attended all at once instead, each to every key up to its own.

    ``wants_logits``: the last row's logits choose the next token; ``all_logits``: so do those of all rows. ``greedy``:
    of these only the likeliest token is wanted. ``sampling``: how else a decode row's token is to be chosen, for
    a backend that can do so where the logits lie; None where they are wanted themselves. ``scored``: pairs (row, token)
    whose log-probability is wanted, with the ``top`` likeliest ones beside it.
    """

    request_id: int
    sequence_id: int
    start: int
    stop: int
    phase: str
    policy: Policy
    span_start: int
    span_stop: int
    span_length: int
    after_cut: bool = False
    wants_logits: bool = False
    all_logits: bool = False
    greedy: bool = False
    sampling: RowSampling | None = None
    scored: tuple[tuple[int, int], ...] = ()
    top: int = 0
    drafts: tuple[int, ...] = ()
    row: int | None = None
    together: bool = False

    @property
    def chosen_there(self) -> bool:
        """Whether the token after the last row can be chosen where its logits lie."""
        return self.greedy or self.sampling is not None

    def apart(self) -> list[ScheduledRequest]:
        """Each row of a step with drafts by itself; else these rows as they are."""
        if not self.drafts:
            return [self]
        return [
            self._replace(start=at, stop=at + 1, drafts=(), row=at - self.start, together=False)
            for at in range(self.start, self.stop)
        ]

    @property
    def length(self) -> int:
        """Rows."""
        return self.stop - self.start

    @property
    def ends_span(self) -> bool:
        """Whether a prefill ends with these rows."""
        return self.phase == "prefill" and self.stop == self.span_stop

    @property
    def rope_length(self) -> int:
        """The length that decides length-dependent rotary factors: the whole prefill's, as an unchunked run has it."""
        return self.stop if self.phase == "decode" else self.span_stop


@dataclass(frozen=True, eq=False)
class StepInput:
    """One step. Request i owns rows ``query_start_loc[i] .. query_start_loc[i + 1] - 1``.

    ``input_ids``, ``positions`` int64 [rows]. ``seq_lens[i]``: keys that request i has after the step. Where they lie
    is for the worker to look up, by the sequence's id (kv/sequence.py): block table, slot mapping.
    """

    scheduled: tuple[ScheduledRequest, ...]
    input_ids: Tensor
    positions: Tensor
    query_start_loc: tuple[int, ...]

    @property
    def request_ids(self) -> tuple[int, ...]:
        return tuple(one.request_id for one in self.scheduled)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return tuple(one.stop for one in self.scheduled)

    def __len__(self) -> int:
        return len(self.scheduled)

    def apart(self) -> StepInput:
        """The same rows, those of drafts each as a request of its own unless they are attended together."""
        if not [one for one in self.scheduled if one.drafts and not one.together]:
            return self
        scheduled: list[ScheduledRequest] = []
        starts = [0]
        for one in self.scheduled:
            for rows in [one] if one.together else one.apart():
                scheduled.append(rows)
                starts.append(starts[-1] + rows.length)
        return StepInput(tuple(scheduled), self.input_ids, self.positions, tuple(starts))

    def part(self, which: Sequence[int]) -> StepInput:
        """The requests ``which`` (rising numbers) as a step of their own."""
        if len(which) == len(self.scheduled):
            return self
        spans = [(self.query_start_loc[i], self.query_start_loc[i + 1]) for i in which]
        starts = [0]
        for first, last in spans:
            starts.append(starts[-1] + last - first)
        rows = [slice(first, last) for first, last in spans]
        return StepInput(
            tuple(self.scheduled[i] for i in which),
            torch.cat([self.input_ids[row] for row in rows]),
            torch.cat([self.positions[row] for row in rows]),
            tuple(starts),
        )


@dataclass(frozen=True, eq=False)
class ReadPairs:
    """What is left of a selection once it was read: ``pairs`` int64 [heads, or one for all], (query row, key) pairs;
    ``kind``, what it was."""

    shape: Shape
    pairs: Tensor
    kind: type[Selection]

    def even_pairs(self) -> None:
        """Its heads may differ."""


@dataclass(frozen=True, eq=False)
class CallCount:
    """What one attention call of one request did at ``layer``: ``used`` was read. ``coverage`` fp32 [units]: what a
    stopping rule believed it had covered."""

    layer: int
    used: Selection | ReadPairs
    cost: Cost
    backend: str
    coverage: Tensor | None = None

    @classmethod
    def of(cls, layer: int, used: Selection, cost: Cost, backend: str, coverage: Tensor | None = None) -> CallCount:
        """Without the lists of a call of many rows: those of all layers would be there at once until the step ends."""
        kept: Selection | ReadPairs = used
        if used.shape.q_len > 1 and used.even_pairs() is None:
            kept = ReadPairs(used.shape, pairs(used), type(used))
        return cls(layer, kept, cost, backend, coverage)

    def of_first(self, rows: int) -> CallCount:
        """The call as if it had been of the first ``rows`` rows alone, where they read everything or a band; else as it
        was."""
        shape = self.used.shape
        if not isinstance(self.used, (Dense, Band)) or rows >= shape.q_len:
            return self
        fewer = replace(shape, q_len=rows, k_len=shape.q_start + rows)
        return replace(self, used=replace(self.used, shape=fewer))


@dataclass(frozen=True)
class SkipCount:
    """Rows of a prefill that skipped ``layer``: ``frozen`` by their policy, to whom the causal mask allows ``pairs``
    (query row, key) pairs; ``unread`` because their output is not read."""

    layer: int
    frozen: int
    pairs: int
    unread: int


@dataclass
class RequestResult:
    """What a step did for one request. ``logits`` fp32 [rows wanted, vocab] on the CPU, or ``tokens``, the one of each
    row wanted, where the device chose them (each time's, of a step that ran several times), with the ``logprobs`` that
    are wanted of these. ``late``: counts that stay on a device until a report is asked for. ``undone``: the step broke
    for reasons that need not be this request's; its rows are to be taken back and scheduled again. ``lost``: keys that
    it needs cannot be had back from a tier; all is to be computed again. ``tiers``: what moved for it between memory
    and a tier; ``widest``: parts that it asked for at the layer that reads most, on the row path;
    ``asked_bytes``: of all parts that it asked for; ``whole``: that was all of its keys, whatever it was to read.

    ``rows``: of a step with drafts, what each row did by itself, so that those that are rejected leave no trace; an
    ``error`` of one is that of all after it (``error_type``: what errors.class_name gives for it). Apart from
    ``undone`` nothing else is filled in then, unless the rows were attended together: ``calls`` are those of all rows,
    which have but their logits or tokens, and ``stay``, once it is told how many of the first rows do, puts them into
    ``late``. ``weighed``: where such rows looked, if that is to be know (engine.steps.carried). ``replayed``: beside a
    dense replay that the device ran, whether the likeliest token is the same, and the divergence from it in nats.
    ``path``: which way its rows took through attention; ``passed_on``: why a backend that was asked first did not serve
    them."""

    logits: Tensor | None = None
    tokens: list[int] | None = None
    logprobs: list[LogprobEntries] | None = None
    prompt_scores: dict[int, LogprobEntries] = field(default_factory=dict)  # by place of the token in the sequence
    calls: list[CallCount] = field(default_factory=list)
    skips: list[SkipCount] = field(default_factory=list)
    late: dict[Any, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    error_type: str | None = None
    undone: bool = False
    lost: bool = False
    tiers: TierCounts | None = None
    widest: int = 0
    asked_bytes: int = 0
    whole: bool = False
    rows: list[RequestResult] = field(default_factory=list)
    stay: Callable[[int], None] | None = None
    weighed: Weighed | None = None
    replayed: tuple[bool, float] | None = None
    path: Path | None = None
    passed_on: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether nothing broke."""
        return not self.undone and all(one.error is None for one in (self, *self.rows))

    def step_bytes(self, one: ScheduledRequest) -> int | None:
        """``asked_bytes``, of a decode step that was not given all of its keys."""
        return self.asked_bytes if one.phase == "decode" and self.asked_bytes and not self.whole else None

    @classmethod
    def of(cls, one: ScheduledRequest) -> RequestResult:
        """Where to write down what the rows of a request do."""
        return cls(rows=[cls() for _ in range(one.length)] if one.drafts else [])

    def note(self, text: str) -> None:
        """Add a sentence to the request's report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def note_of(self, text: str | None) -> None:
        """Likewise, if there is one."""
        if text is not None:
            self.note(text)


def results_of(results: dict[int, RequestResult], one: ScheduledRequest) -> list[RequestResult]:
    """Where to write down what ``one`` did, and behind it the results of the drafted rows after it."""
    result = results[one.request_id]
    return [result] if one.row is None else result.rows[one.row :]


@dataclass
class StepResult:
    """What a step did, by request id. ``fresh``: it was the first of its kind, or recorded, or made what a prompt had
    left to be made, so the next one may take much less time."""

    requests: dict[int, RequestResult]
    seconds: float = 0.0
    fresh: bool = False
