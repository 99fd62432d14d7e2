"""Who runs in the next step: first come, first served, with chunked prefill and decode mixed in one batch."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from saccade.engine.memory.kept_states import shared_before
from saccade.engine.memory.sequence import Sequence
from saccade.engine.request import Request
from saccade.engine.scheduling.batch_control import BatchControl
from saccade.engine.scheduling.prefixes import PrefixCache
from saccade.engine.scheduling.step_rows import next_rows
from saccade.engine.scheduling.token_gap import Suspended
from saccade.engine.steps.step import ScheduledRequest
from saccade.errors import failure
from saccade.kv.blocks import BlockManager

MOST_PASSED = 16  # waiting requests that others pass by, which had better wait: each is looked up in every step


class Scheduler:
    """Admits requests while blocks last, builds steps, and preempts the latest arrival when blocks run out.

    Prefill runs in whole chunks whose borders depend on the request alone, so that what a sparse method selects never
    depends on the batch. ``max_batch_rows`` bounds the rows of a step; one chunk always fits. ``control`` holds
    decoding requests back whose KV does not fit in memory beside the others', and says which prefills would hold up
    tokens: their chunks are cut, or run apart from the step (``suspended``), which they outlive. ``drop`` is called
    with the id of a request whose suspended chunk is given up.
    """

    def __init__(
        self,
        pool: BlockManager,
        *,
        chunk: int,
        max_batch_rows: int,
        max_requests: int,
        prefixes: PrefixCache | None = None,
        control: BatchControl | None = None,
        drop: Callable[[int], None] = lambda request: None,
        dense_chunk: int | None = None,
    ) -> None:
        self.pool = pool
        self.control = BatchControl(pool) if control is None else control
        self.prefixes = prefixes
        self.chunk = chunk
        self.dense_chunk = chunk if dense_chunk is None else dense_chunk
        self.max_batch_rows = max(max_batch_rows, self.chunk, self.dense_chunk)
        self.max_requests = max_requests
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.idle: OrderedDict[int, Sequence] = OrderedDict()  # sessions between turns, least recently used first
        self.suspended: dict[int, Suspended] = {}  # chunks that run apart from steps, by request
        self._drop = drop
        self._left: set[int] = set()  # ids of those that had to go on waiting

    def _chunk(self, request: Request) -> int:
        """Most rows of the request's prefill in a step: chunks that decide what is read are alike on every device."""
        span = request.sequence.upcoming
        return self.chunk if span is None or span.policy.selects_by_chunk else self.dense_chunk

    def add(self, request: Request) -> None:
        self.idle.pop(id(request.sequence), None)
        self.waiting.append(request)

    def adopt(self, request: Request) -> None:
        """Take in a request whose prompt is computed already: it runs on if there is room, else it is the next."""
        if len(self.running) < self.max_requests:
            self.running.append(request)
        else:
            self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a request out; its blocks stay with its sequence."""
        rows, sequence = self.give_up(request), request.sequence
        if rows is not None and (not request.keep_kv or sequence.computed < sequence.reached):
            sequence.undo(rows)  # else the turn is taken back, which knows what it found
        if request in self.running:
            self.running.remove(request)
            sequence.memories.rest(sequence.id)
        elif request in self.waiting:
            self.waiting.remove(request)

    def give_up(self, request: Request) -> ScheduledRequest | None:
        """End a chunk that is suspended, if the request has one: its rows, some of whose layers have run."""
        held = self.suspended.pop(request.id, None)
        if held is None:
            return None
        self._drop(request.id)
        return held.rows

    def park(self, sequence: Sequence) -> None:
        """Keep a session's KV for its next turn, until its blocks are needed."""
        self.idle[id(sequence)] = sequence

    def schedule(self) -> list[tuple[Request, ScheduledRequest]]:
        """Who runs in the next step, and which rows; empty when nothing waits or runs, or all that runs waits for what
        its constraints allow. Blocks for them are reserved."""
        with self.pool.publishing_once():
            return self._schedule()

    def _schedule(self) -> list[tuple[Request, ScheduledRequest]]:
        self.pool.advance()
        new = [one for one in self.waiting if one.id not in self._left][: max(0, self.max_requests - len(self.running))]
        self.control.begin(self.running, new, self.suspended)
        batch: list[tuple[Request, ScheduledRequest]] = []
        rows = 0
        for request in list(self.running):
            if request not in self.running:  # preempted while making room for an earlier one
                continue
            if request.id in self.suspended or not self.control.lets(request):
                continue
            self._resume(request)
            request.sequence.memories.pin(request.sequence.id, request.sequence.computed)
            turn = self.control.turn(request, self._chunk(request))
            if not turn.rows:
                continue
            work = next_rows(request, turn.rows)
            if work.wants_logits and request.awaits_mask:
                continue
            if turn.apart:
                work = self._cut(request, work)
                if self._fits_apart(request, work) and self._reserve(request, work.stop, batch):
                    self.suspended[request.id] = Suspended(request, work)
                continue
            if batch and rows + work.length > self.max_batch_rows:
                continue
            if self._reserve(request, work.stop, batch):
                batch.append((request, work))
                rows += work.length
        put_off = 0  # requests at the head that had better wait for what another computes
        while put_off < min(len(self.waiting), MOST_PASSED) and len(self.running) < self.max_requests:
            request = self.waiting[put_off]
            if self.prefixes is not None and not self.prefixes.lend(request, self.running):
                put_off += 1
                continue
            self._resume(request)
            turn = self.control.turn(request, self._chunk(request), joins=True)
            work = next_rows(request, turn.rows or self._chunk(request))
            if turn.rows and not turn.apart and batch and rows + work.length > self.max_batch_rows:
                break
            if not self.control.admits(self.running, request) or not self._admit(request):
                break
            del self.waiting[put_off]
            self.running.append(request)
            request.sequence.memories.pin(request.sequence.id, request.sequence.computed)
            if request.finished or not turn.rows:  # its blocks could not be had, or its rows' turn comes
                continue
            if work.wants_logits and request.awaits_mask:
                continue
            if turn.apart:
                work = self._cut(request, work)
                if self._fits_apart(request, work):
                    self.suspended[request.id] = Suspended(request, work)
                continue
            batch.append((request, work))
            rows += work.length
        self._left = {one.id for one in self.waiting}
        self.control.put_together([work for _, work in batch], self.suspended)
        # Rows that decode come first: layers that leave out rows of a prompt then leave them where they are (host.py).
        return sorted(batch, key=lambda one: one[1].phase == "prefill")

    def _cut(self, request: Request, work: ScheduledRequest) -> ScheduledRequest:
        """Rows that run apart leave no copy of states in their midst: they end where others may go on."""
        states = self.pool.states
        place = 0 if states is None else shared_before(work, states.block)
        return next_rows(request, place - work.start) if place > work.start else work

    def _fits_apart(self, request: Request, work: ScheduledRequest) -> bool:
        """Whether one more chunk may be suspended: what rows carry from layer to layer takes memory. Beside a whole one
        there is room for half a chunk of others, and always for the first that prefills."""
        held = sum(one.rows.length for one in self.suspended.values())
        return held + work.length <= self.chunk + self.chunk // 2 or self.control.comes_first(request)

    def goes_on(self, batch: list[tuple[Request, ScheduledRequest]]) -> bool:
        """Whether the next step will most likely have the same requests, each with the token that the device
        chooses in this one: no request waits, and none has all its tokens by then. Blocks for it are reserved, where
        many are free, or only kept for prefixes; none while parts of others are absent: it may have no slots yet."""
        if self.waiting or len(batch) != len(self.running):
            return False
        for request, rows in batch:
            single = rows.phase == "decode" and rows.length == 1 and rows.chosen_there and rows.wants_logits
            drafts = request.speculation is not None and not request.speculation.pace.rests(rows.stop + 1)
            if not single or drafts:
                return False
            if len(request.sequence.tokens) + 1 - request.output_start >= request.max_tokens:
                return False
        absent = self.pool.absent > 0
        with self.pool.publishing_once():
            for request, rows in batch:
                kv = request.sequence.kv
                if kv.missing_blocks(rows.stop + 1):
                    if absent:
                        return False
                    while not self.pool.roomy and self.prefixes is not None and self.prefixes.evict():
                        pass  # what a server keeps fills any pool in the end
                    if not self.pool.roomy:
                        return False
                    kv.reserve(rows.stop + 1)
        return absent or not self.pool.absent

    def preempt(self, request: Request) -> None:
        """Drop a running request's KV and queue it first; it computes everything again when it returns."""
        self.give_up(request)
        self.running.remove(request)
        request.sequence.drop_kv()
        request.report.preemptions += 1
        self.waiting.appendleft(request)

    def _resume(self, request: Request) -> None:
        """Have a request go on where the states of its model's layers stand; what it had beyond is computed again."""
        if self.pool.states is None:
            return
        sequence = request.sequence
        sequence.resume(self.chunk)
        lost, sequence.owed = sequence.owed, 0
        if lost:
            report = request.report
            report.recomputed_tokens += lost
            report.cached_tokens = min(report.cached_tokens, request.sequence.computed)
            report.note("tokens were computed again from where a state of the model's layers was kept")

    def _admit(self, request: Request) -> bool:
        """Reserve the whole sequence at once, so that a prefill never has to be preempted half-way by its own
        growth."""
        sequence = request.sequence
        missing = sequence.kv.missing_blocks(len(sequence.tokens))
        self._make_room(missing, request)
        if missing > self.pool.free_blocks:
            return False
        self._allocate(request, len(sequence.tokens))
        return True

    def _reserve(self, request: Request, tokens: int, batch: list[tuple[Request, ScheduledRequest]]) -> bool:
        """Blocks for a running request, preempting later arrivals if need be; False when it had to yield itself."""
        while True:
            missing = request.sequence.kv.missing_blocks(tokens)
            self._make_room(missing, request)
            if missing <= self.pool.free_blocks:
                return self._allocate(request, tokens)
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                request.finish_reason = "length"
                request.report.note(
                    f"stopped at {len(request.sequence.tokens)} tokens: the KV pool is full; raise kv_memory"
                )
                return False
            self.preempt(victim)
            batch[:] = [(other, work) for other, work in batch if other is not victim]
            if victim is request:
                return False

    def _allocate(self, request: Request, tokens: int) -> bool:
        """Take the blocks for which there is room; False, with the request's end, where that fails: the others need not
        suffer for it."""
        try:
            request.sequence.kv.reserve(tokens)
        except Exception as error:
            request.error, request.error_type = failure(error, "allocating KV blocks")
            request.finish_reason = "error"
            return False
        return True

    def _make_room(self, missing: int, request: Request) -> None:
        """Take blocks from what does not run: prefixes of ended requests first, then idle sessions, then turns that
        wait, the last of them first."""
        while missing > self.pool.free_blocks and self.prefixes is not None and self.prefixes.evict():
            pass
        for sequence in self.idle.values() if self.pool.states is not None else ():
            if missing <= self.pool.free_blocks:
                return
            sequence.resume(self.chunk)  # keys behind the last state that is left are of no use
        while missing > self.pool.free_blocks and self.idle:
            _, sequence = self.idle.popitem(last=False)
            sequence.drop_kv()
        for other in reversed(self.waiting):
            if missing <= self.pool.free_blocks:
                return
            if other is not request:
                other.sequence.drop_kv()
                other.report.cached_tokens = 0
