"""A request and its sequence: tokens, how each stretch of them is computed, KV, method state, results so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from saccade.engine.params import SamplingParams
from saccade.engine.report import Report
from saccade.kv.pool import BlockPool
from saccade.kv.sequence import SequenceKV
from saccade.methods.base import Evicting
from saccade.methods.dense import DenseMethod
from saccade.methods.policy import Policy


@dataclass
class Span:
    """Tokens ``start .. stop - 1`` are computed in one phase under one policy.

    Spans are kept so that KV that was dropped can be computed again exactly as before: prompts in the same chunks,
    generated tokens one decode step at a time.
    """

    start: int
    stop: int
    phase: str
    policy: Policy
    length: int = 0  # of the context when this was begun, these tokens included; stays when the span is cut short
    after_cut: bool = False  # a prefill that goes on where tokens were cut off: older states saw what is gone

    def __post_init__(self) -> None:
        self.length = self.length or self.stop


@dataclass
class Work:
    """Rows ``start .. stop - 1`` of one request in one step."""

    request: Request
    start: int
    stop: int
    phase: str
    policy: Policy
    span_start: int
    ends_span: bool
    after_cut: bool = False

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Mark:
    """What a turn taken back returns to. A prefill leaves the states it finds as they are; none once dropped."""

    reached: int
    seen: int
    states: list[Any] = field(default_factory=list)
    gone: list[Tensor | None] = field(default_factory=list)


class Sequence:
    """The token sequence of a session or a single request, with everything the engine keeps for it between steps."""

    def __init__(self, pool: BlockPool, layers: int, rope_regime: Callable[[int], int] = lambda length: 0) -> None:
        self.rope_regime = rope_regime  # sequences of unequal regime have unequal rotary factors
        self.tokens: list[int] = []
        self.kv = SequenceKV(pool, layers)
        self.spans: list[Span] = []
        self.computed = 0  # tokens whose keys and values are stored
        self.reached = 0  # where `computed` would stand had nothing been dropped
        self.seen = 0  # tokens that the states were built from, had nothing been dropped: more than reached after a cut
        self.states: list[Any] = [None] * layers  # decode-method state of each layer
        self.tails: list[Tensor | None] = [None] * layers  # last prefill queries of each layer, for `begin`
        self.gone: list[Tensor | None] = [None] * layers  # keys that earlier turns evicted: see methods.Evicting
        self.watched: list[Any] = [None] * layers  # what the decode method noted of the running prefill
        self.turn_start: _Mark | None = None  # where the last turn began, if its keys were there
        self.turn: Request | None = None  # what is being computed for it now

    def extend(self, tokens: list[int], phase: str, policy: Policy) -> None:
        """Append tokens to be computed in ``phase``; decode tokens of one turn share a span."""
        start = self.spans[-1].stop if self.spans else 0
        self.tokens.extend(tokens)
        last = self.spans[-1] if self.spans else None
        if last is not None and phase == "decode" and last.phase == "decode" and last.policy == policy:
            last.stop = len(self.tokens)
        else:
            self.spans.append(Span(start, len(self.tokens), phase, policy))

    def begin_turn(self, tokens: list[int], policy: Policy, decoded: int = 0) -> None:
        """Append a turn, whose last ``decoded`` tokens run as decode steps. A last token of the turn before that was
        sampled but never computed joins the prefill."""
        self._trim_spans(self.reached)
        self.tokens.extend(tokens)
        stop = len(self.tokens) - decoded
        if stop > self.reached:
            self.spans.append(Span(self.reached, stop, "prefill", policy, after_cut=self.seen > self.reached))
        elif any(state is not None for state in self.states):
            self.drop_kv()  # no prefill begins the state anew, and this one may have seen rows that were cut off
        self.turn_start = None
        if self.computed == self.reached:
            self.turn_start = _Mark(self.reached, self.seen, list(self.states), list(self.gone))
        if decoded:
            self.spans.append(Span(stop, len(self.tokens), "decode", policy))

    def border(self, length: int) -> int:
        """The longest prefix of at most ``length`` tokens that can be kept exactly: what a sparse prefill selected for
        its first rows may hang on its last ones, and so may what a decode method evicted at its end; such a stretch is
        kept whole or not at all."""
        dense = DenseMethod()
        for span in self.spans:
            sparse = span.policy.prefill != dense or span.policy.freeze is not None or span.policy.decode.evicts
            if span.start < length < span.stop and span.phase == "prefill" and sparse:
                return span.start
        return length

    def advance(self, stop: int) -> None:
        """Tokens up to ``stop`` are stored."""
        self.computed = stop
        if stop > self.reached:
            self.reached = self.seen = stop

    def truncate(self, length: int, reached: int | None = None) -> None:
        """Forget every token from ``length`` on, and what was computed from ``reached`` (default ``length``) on."""
        self.reached = min(self.reached, length if reached is None else reached)
        if self.kv.view(0).length > self.reached:  # also by a step that failed on the way
            self._go_back()
        if (mark := self.turn_start) is not None and mark.reached == self.reached:
            self.seen = mark.seen
        self.computed = min(self.computed, self.reached)
        del self.tokens[length:]
        self.kv.truncate(self.computed)
        self._trim_spans(self.reached)

    @property
    def _evicts(self) -> bool:
        return any(isinstance(state, Evicting) for state in self.states) or any(gone is not None for gone in self.gone)

    def _go_back(self) -> None:
        """Undo what rows from ``reached`` on have evicted: from the turn's beginning if they are its own, else by
        computing everything again."""
        mark, evicting = self.turn_start, [state for state in self.states if isinstance(state, Evicting)]
        begun = any(watched is not None for watched in self.watched)
        known = max((gone.shape[1] for gone in self.gone if gone is not None), default=0)
        self.watched = [None] * len(self.watched)
        back = mark is not None and mark.reached == self.reached
        lost = back and any(state is not None for state in self.states)  # those of the turn before, unless marked
        if mark is not None and back and mark.states:
            self.states, self.gone = list(mark.states), list(mark.gone)
        elif lost or self.reached < known or begun or not all(state.holds(self.reached) for state in evicting):
            self.drop_kv()

    def _trim_spans(self, stop: int) -> None:
        for span in self.spans:
            span.stop = min(span.stop, stop)
        self.spans = [span for span in self.spans if span.stop > span.start]

    def undo(self, work: Work) -> None:
        """Take back a step that broke off between layers, so that it can run again."""
        stateful = work.phase == "decode" and any(state is not None for state in self.states)
        if stateful or self._evicts or any(kept is not None for kept in [*self.tails, *self.watched]):
            self.drop_kv()  # state may have seen the step already; it is built again with the keys
        else:
            self.computed = work.start
            self.kv.truncate(work.start)

    def drop_kv(self) -> None:
        """Give all blocks back; the next steps compute them again."""
        self.kv.free()
        self.computed = 0
        self.states = [None] * len(self.states)
        self.tails = [None] * len(self.tails)
        self.gone = [None] * len(self.gone)
        self.watched = [None] * len(self.watched)
        self.turn_start = self.turn_start and _Mark(self.turn_start.reached, self.turn_start.seen)
        if self.rope_regime(len(self.tokens)) == self.rope_regime(1):
            self.spans = _merged_if_dense(self.spans)

    def restart(self, policy: Policy | None = None) -> None:
        """Forget all that was computed: the next turn prefills every token, or with ``policy`` the next steps do."""
        self.drop_kv()
        self.reached = self.seen = 0
        self.spans = [] if policy is None else [Span(0, len(self.tokens), "prefill", policy)]

    def next_rows(self, chunk: int) -> tuple[int, int, Span] | None:
        """The next rows to compute: a chunk of a prefill span, or one token of a decode span; None when all are stored.

        Chunk borders depend on the span alone, never on what else is in the batch.
        """
        for span in self.spans:
            if self.computed < span.stop:
                if span.phase == "decode":
                    return self.computed, self.computed + 1, span
                return self.computed, min(self.computed + chunk, span.stop), span
        return None


def _merged_if_dense(spans: list[Span]) -> list[Span]:
    """Dense decode steps give the keys that a dense prefill gives, so they may be computed again in chunks."""
    if spans and all(span.policy == Policy() for span in spans):
        return [Span(spans[0].start, spans[-1].stop, "prefill", spans[-1].policy)]
    return spans


@dataclass
class TokenLogprob:
    """Log-probability of one token under the model's unprocessed distribution; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


class Request:
    """One sample of one prompt on its way through the engine."""

    _next_id = 0

    def __init__(
        self,
        sequence: Sequence,
        prompt: list[int],
        params: SamplingParams,
        policy: Policy,
        max_length: int,
        layers: int,
        decoded: int = 0,
    ) -> None:
        Request._next_id += 1
        self.id = Request._next_id
        self.sequence = sequence
        self.prompt = prompt
        self.params = params
        self.policy = policy
        self.rollback = (len(sequence.tokens), sequence.reached)  # where a cancelled turn leaves its session
        self.first_row = sequence.reached  # of those this turn computes
        sequence.begin_turn(prompt, policy, decoded)
        self.output_start = len(sequence.tokens)
        limit = max_length - self.output_start
        self.max_tokens = limit if params.max_tokens is None else min(params.max_tokens, limit)
        self.report = Report(policy.text, layers)
        self.report.prompt_tokens = self.output_start
        self.report.cached_tokens = sequence.computed
        for part in (policy.window, policy.freeze):
            if part is not None and not part.acts(layers):
                self.report.note(f"'{part.text}' leaves a model of {layers} layers as it is")
        self.text = ""
        self.logprobs: list[dict[int, TokenLogprob]] = []
        self.prompt_scores: dict[int, dict[int, tuple[float, int]]] = {}  # by place in the sequence: see row_logprobs
        self.prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None  # one a prompt token, at the end
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.keep_kv = False  # a session's sequence stays after the request ends
        self.arrived = time.perf_counter()
        self.sampler: Any = None  # set by the engine, with the two below
        self.detokenizer: Any = None
        self.stopper: Any = None
        self.final_ids: list[int] = []  # the answer, once the request ended
        self.dropped: list[int] = []  # a session's tokens that this turn replaces; they return if it is cancelled
        self.outbox: deque[StepOutput] | None = None  # outputs not yet read, for a request that is streamed

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.sequence.tokens[self.output_start :]

    def to_score(self, start: int, stop: int) -> list[int]:
        """The rows among ``start .. stop - 1`` that predict a prompt token whose log-probability is wanted still.

        Rows of earlier turns never count, even if they are computed again: what was dropped must not show in a result.
        """
        if self.params.prompt_logprobs is None:
            return []
        first = self.output_start - len(self.prompt) + self.params.prompt_logprobs_start - 1
        rows = range(max(start, first, self.first_row), min(stop, self.output_start - 1))
        return [row for row in rows if row + 1 not in self.prompt_scores]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class StepOutput:
    """What one engine step did for one request. ``finished``: it is the request's last."""

    request: Request
    new_text: str = ""
    new_tokens: list[int] = field(default_factory=list)
    prefilled: int = 0  # prompt tokens computed so far
    prefill_total: int = 0
    finished: bool = False
