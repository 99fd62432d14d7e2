"""A sequence: its tokens, how each stretch of them is computed, and what of it is computed so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from saccade.engine.memory.memories import Memories
from saccade.engine.memory.sequence_memory import Cut
from saccade.engine.steps.step import ScheduledRequest
from saccade.kv.blocks import BlockManager
from saccade.methods.policy import Policy

_ids = count(1)


def new_sequence_id() -> int:
    """An id that no other sequence of this process has."""
    return next(_ids)


class Turn(Protocol):
    """What is being computed for a sequence (a request of the engine), as the sequence knows it."""

    max_tokens: int

    @property
    def output_ids(self) -> list[int]:
        """The tokens of its answer so far."""
        ...


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


@dataclass(frozen=True)
class _Mark:
    """What a turn taken back returns to."""

    reached: int
    seen: int


@dataclass(frozen=True)
class Standing:
    """Where a session stood before a turn cut it: the tokens that it ``dropped``, and how all were computed."""

    dropped: list[int]
    spans: list[Span]
    reached: int
    seen: int


class Sequence:
    """The token sequence of a session or a single request. ``kv`` has its lengths and its block table; keys, values
    and method states are a worker's, whose ``memories`` are told what becomes of them."""

    def __init__(
        self, pool: BlockManager, memories: Memories, rope_regime: Callable[[int], int] = lambda length: 0
    ) -> None:
        self.id = new_sequence_id()
        self.memories = memories
        self.salt: str | None = None  # the turns'; sequences of unequal salt share no blocks
        self.private = False  # turns named unequal salts: what they hold is not shared
        self.note: str | None = None  # what the report of the next turn is to say
        self.rope_regime = rope_regime  # sequences of unequal regime have unequal rotary factors
        self.tokens: list[int] = []
        self.kv = memories.open(self.id, pool)
        self.spans: list[Span] = []
        self.computed = 0  # tokens whose keys and values are stored
        self.reached = 0  # where `computed` would stand had nothing been dropped
        self.seen = 0  # tokens that the states were built from, had nothing been dropped: more than reached after a cut
        self.turn_start: _Mark | None = None  # where the last turn began
        self.turn: Turn | None = None  # what is being computed for it now
        self.owed = 0  # tokens that are computed again as a state went: see `resume`

    def extend(self, tokens: list[int], phase: str, policy: Policy) -> None:
        """Append tokens to be computed in ``phase``; decode tokens of one turn share a span."""
        start = self.spans[-1].stop if self.spans else 0
        self.tokens.extend(tokens)
        last = self.spans[-1] if self.spans else None
        if last is not None and phase == "decode" and last.phase == "decode" and last.policy == policy:
            last.stop = len(self.tokens)
        else:
            self.spans.append(Span(start, len(self.tokens), phase, policy))

    def salted(self, salt: str) -> None:
        """A turn names ``salt``."""
        self.private = self.private or (self.salt is not None and self.salt != salt)
        self.salt = salt

    def begin_turn(self, tokens: list[int], policy: Policy, decoded: int = 0) -> None:
        """Append a turn, whose last ``decoded`` tokens run as decode steps. A last token of the turn before that was
        sampled but never computed joins the prefill."""
        self._trim_spans(self.reached)
        self.tokens.extend(tokens)
        stop = len(self.tokens) - decoded
        if stop > self.reached:
            self.spans.append(Span(self.reached, stop, "prefill", policy, after_cut=self.seen > self.reached))
        elif self.memories.has_state(self.id):
            self.drop_kv()  # no prefill begins the state anew, and this one may have seen rows that were cut off
        self.turn_start = _Mark(self.reached, self.seen)
        # Where keys were dropped before, so were the states.
        self.memories.begin_turn(self.id, self.reached, keeps=self.computed == self.reached)
        if decoded:
            self.spans.append(Span(stop, len(self.tokens), "decode", policy))

    def border(self, length: int) -> int:
        """The longest prefix of at most ``length`` tokens that can be kept exactly: what a sparse prefill selected for
        its first rows may hang on its last ones, and so may what a decode method evicted at its end; such a stretch is
        kept whole or not at all."""
        for span in self.spans:
            sparse = not span.policy.prefill.is_dense or span.policy.freeze is not None or span.policy.decode.evicts
            if span.start < length < span.stop and span.phase == "prefill" and sparse:
                return span.start
        return length

    def advance(self, stop: int) -> None:
        """Tokens up to ``stop`` are stored."""
        self.computed = stop
        if stop > self.reached:
            self.reached = self.seen = stop

    def filled(self, stop: int) -> None:
        """Tokens up to ``stop`` were stored by no step, and the states that go with them are there."""
        self.memories.filled(self.id, stop)
        self.advance(stop)

    def truncate(self, length: int, reached: int | None = None) -> None:
        """Forget every token from ``length`` on, and what was computed from ``reached`` (default ``length``) on."""
        self.reached = min(self.reached, length if reached is None else reached)
        if not self.memories.truncate(self.id, self.reached, Cut.TURN, stored=self.computed):
            self._lose_kv()
        if (mark := self.turn_start) is not None and mark.reached == self.reached:
            self.seen = mark.seen
        self.computed = min(self.computed, self.reached)
        del self.tokens[length:]
        self._trim_spans(self.reached)

    def resume(self, chunk: int) -> int:
        """Go back to where the model's layers that keep a state have one, if that after the last token is gone: what
        follows is computed again as it was, in chunks of so many rows. Returns how many tokens that are; ``owed`` has
        those that no report has told of."""
        left = self.memories.resume(self.id, self.computed, lambda at: _resumes(self.spans, at, chunk))
        lost, self.computed = self.computed - left, left
        self.owed += lost
        if lost and self.rope_regime(len(self.tokens)) == self.rope_regime(1):
            self.spans = _merged_if_dense(self.spans)
        return lost

    def snapshots(self, chunk: int) -> tuple[int, ...]:
        """The tokens after which layers have a state from which what follows can be computed again as it was, in chunks
        of so many rows; rising."""
        return tuple(at for at in self.memories.snapshots(self.id) if _resumes(self.spans, at, chunk))

    def standing(self, kept: int) -> Standing:
        """Where it stands before a turn that keeps its first ``kept`` tokens."""
        return Standing(self.tokens[kept:], [replace(span) for span in self.spans], self.reached, self.seen)

    def bring_back(self, before: Standing, chunk: int) -> None:
        """Stand where it stood ``before`` a turn that was truncated since. What that had cut off is computed again as
        it was, in chunks of so many rows; so are keys before it whose states are gone."""
        self.tokens.extend(before.dropped)
        if self.reached == before.reached:
            return
        self.spans, self.reached, self.seen = before.spans, before.reached, before.seen
        self.turn_start = None
        self.computed = usable(self.spans, self.computed, chunk)
        self.memories.truncate(self.id, self.computed, Cut.FORGOTTEN)

    def keep(self, stop: int, rows: ScheduledRequest) -> None:
        """Of a step with drafts keep the rows before ``stop``. Nothing is taken back where the last of these failed, or
        where everything is to be computed again."""
        if self.computed == stop < rows.stop:
            cut = Cut.UNSEEN if rows.together else Cut.REJECTED  # no method has seen rows that were attended together
            self.memories.truncate(self.id, stop, cut, holds=rows.together and self.kv.pool.roomy)
        self.memories.settled(self.id)

    def _trim_spans(self, stop: int) -> None:
        for span in self.spans:
            span.stop = min(span.stop, stop)
        self.spans = [span for span in self.spans if span.stop > span.start]

    def undo(self, rows: ScheduledRequest) -> None:
        """Take back a step that broke off between layers, so that it can run again."""
        told = rows.phase == "decode" or rows.ends_span  # what a method has begun with, or learnt from
        if self.memories.truncate(self.id, rows.start, Cut.BROKEN, stored=self.computed, learns=told):
            self.computed = rows.start
        else:
            self._lose_kv()

    def drop_kv(self) -> None:
        """Give all blocks back; the next steps compute them again."""
        self.memories.free(self.id)
        self._lose_kv()

    def close(self) -> None:
        """Give all blocks back; the worker forgets the sequence."""
        self.memories.free(self.id, closes=True)

    def _lose_kv(self) -> None:
        """All blocks are given back."""
        self.computed = self.owed = 0
        if self.rope_regime(len(self.tokens)) == self.rope_regime(1):
            self.spans = _merged_if_dense(self.spans)

    def take_over(self, other: Sequence) -> None:
        """Go on from where ``other``, of the same tokens and spans, stands now: share its blocks, and a copy of what
        its method knows. CapacityError, changing nothing, where no block is left for what is this one's own."""
        self.kv = self.memories.fork(other.id, self.id)
        self.computed, self.reached, self.seen = other.computed, other.reached, other.seen

    def go_on_from(self, other: int, length: int) -> None:
        """Share the first ``length`` tokens of another sequence, whole blocks, in place of computing them."""
        self.kv = self.memories.fork(other, self.id, length)
        self.computed = length
        self.reached, self.seen = max(self.reached, length), max(self.seen, length)

    def restart(self, policy: Policy | None = None) -> None:
        """Forget all that was computed: the next turn prefills every token, or with ``policy`` the next steps do."""
        self.drop_kv()
        self.reached = self.seen = 0
        self.spans = [] if policy is None else [Span(0, len(self.tokens), "prefill", policy)]

    def next_rows(self, chunk: int) -> tuple[int, int, Span] | None:
        """The next rows to compute: a chunk of a prefill span, or one token of a decode span; None when all are stored.

        Chunk borders depend on the span alone, never on what else is in the batch.
        """
        span = self.upcoming
        if span is None:
            return None
        if span.phase == "decode":
            return self.computed, self.computed + 1, span
        return self.computed, min(self.computed + chunk, span.stop), span

    @property
    def upcoming(self) -> Span | None:
        """The span whose rows are computed next; None when all are stored."""
        for span in self.spans:
            if self.computed < span.stop:
                return span
        return None


def common(ours: list[int], theirs: list[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (one, other) in enumerate(zip(ours, theirs)) if one != other), min(len(ours), len(theirs)))


def usable(spans: list[Span], length: int, chunk: int) -> int:
    """How many of the first ``length`` stored tokens a sequence can keep when it has lost all after them, and what its
    method knew, so that the rest is computed as it was before: up to where a chunk of a prefill began, or a step; and
    only within the first prefill where a decode method builds its state from more than its last rows."""
    if any(span.policy.freeze is not None for span in spans):  # it counts from the prompt's end
        return 0
    if not all(span.policy.decode.is_dense for span in spans):
        first = spans[0]
        limit = 0 if first.policy.decode.watches else first.stop - max(1, first.policy.decode.tail_rows)
        spans, length = spans[:1], min(length, limit)
    for span in spans:
        if length < span.stop:
            return span.start + max(0, length - span.start) // chunk * chunk if span.phase == "prefill" else length
    return spans[-1].stop if spans else 0


def _resumes(spans: list[Span], length: int, chunk: int) -> bool:
    """Whether what comes after ``length`` tokens can be computed again as it was: see :func:`usable`; anywhere where
    all was read; and in any prefill before the rows of which a decode method's state begins, if no earlier one counts.
    """
    if all(span.policy == Policy() for span in spans) or usable(spans, length, chunk) == length:
        return True
    if any(span.policy.freeze is not None or span.policy.decode.watches or span.policy.decode.evicts for span in spans):
        return False
    span = next((one for one in spans if length < one.stop), None)
    if span is None or span.phase != "prefill" or length > span.stop - max(1, span.policy.decode.tail_rows):
        return False
    return not span.policy.selects_by_chunk or (length - span.start) % chunk == 0


def _merged_if_dense(spans: list[Span]) -> list[Span]:
    """Dense decode steps give the keys that a dense prefill gives, so they may be computed again in chunks."""
    if spans and all(span.policy == Policy() for span in spans):
        return [Span(spans[0].start, spans[-1].stop, "prefill", spans[-1].policy)]
    return spans
