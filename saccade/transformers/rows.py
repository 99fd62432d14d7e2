"""One pass of a model over new rows of a batch: which are real, which steps they make, and what they did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.engine.core import new_request_id
from saccade.engine.memory.sequence import new_sequence_id
from saccade.engine.memory.sequence_memory import Cut
from saccade.engine.rows.attention import RowAttention
from saccade.engine.rows.layers_pass import path_of
from saccade.engine.steps.step import RequestResult, ScheduledRequest, StepInput, StepResult
from saccade.engine.watch.report import Report
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy
from saccade.models.interface import LayerAttention
from saccade.transformers.runtime import Running, Runtime

Places = range | list[int]  # columns


@dataclass
class Row:
    """A sequence of a batch. ``stored``: its tokens in the pool; ``seen``: those that states were built from, more
    after a cut. ``prefill``: the prompt that is being read, from its first token to behind its last, ``after_cut``:
    where tokens were cut off; ``decodes_from``: where decode began."""

    id: int
    report: Report
    request: int
    stored: int = 0
    seen: int = 0
    prefill: tuple[int, int] = (0, 0)
    after_cut: bool = False
    decodes_from: int | None = None
    under: Policy | None = None  # the policy of its last prompt

    @classmethod
    def new(cls, runtime: Runtime, running: Running, policy: Policy) -> Row:
        made = cls(new_sequence_id(), Report(policy, runtime.layers), new_request_id())
        runtime.memories.open(made.id, running.pool)
        made.report.token_bytes = runtime.memories[made.id].kv.token_bytes
        return made

    def cut(self, runtime: Runtime, length: int) -> None:
        """Forget the tokens from ``length`` on. SaccadeError where what a method knows cannot go back."""
        if length == self.stored:
            return
        if not runtime.memories[self.id].truncate(length, Cut.TURN, self.stored, False, False):
            raise SaccadeError(
                f"crop to {length} tokens: what '{self.report.policy.text}' keeps of this sequence cannot go back; "
                "crop under 'dense', or begin with a new cache"
            )
        self.stored, self.decodes_from = length, None
        self.prefill = min(self.prefill[0], length), min(self.prefill[1], length)


@dataclass
class Part:
    """Rows that one planned step attends: decode rows of several sequences, or a chunk of one sequence's prompt."""

    attention: RowAttention
    scheduled: Sequence[ScheduledRequest]
    result: StepResult
    rows: Sequence[int]  # of the batch
    places: Places  # the columns of a chunk; of decode rows the only one

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, out: Tensor) -> None:
        """Store and attend; ``out`` [batch, rows, heads, head_dim]."""
        if self.scheduled[0].phase == "decode":
            every = len(self.rows) == q.shape[0]
            q, k, v = ((one if every else one[list(self.rows)])[:, :, 0].transpose(0, 1) for one in (q, k, v))
            done = self.attention.context.run(layer, q, k, v, spec).transpose(0, 1)
            if every:
                out[:, 0] = done
            else:
                out[list(self.rows), 0] = done
        else:
            row = self.rows[0]
            places = _index(self.places)
            q, k, v = (one[row][:, places] for one in (q, k, v))
            out[row, places] = self.attention.context.run(layer, q, k, v, spec).transpose(0, 1)
        for one in self.result.requests.values():
            if one.error is not None:
                raise SaccadeError(one.error)

    def settle(self) -> None:
        """Which path its rows took."""
        for rows in self.attention.rows:
            rows.result.path = path_of(rows, self.attention)


class Pass:
    """The rows that a model's layers are given, ``real`` of them: by row of the batch the columns that are no padding.
    Layers come in order. ``total``: tokens of each row's prompt where this is a part of it, else None."""

    def __init__(
        self,
        runtime: Runtime,
        running: Running,
        rows: Sequence[Row],
        policy: Policy,
        columns: int,
        real: Sequence[Places],
        total: Sequence[int] | None = None,
    ) -> None:
        self.runtime, self.rows, self.columns, self.next = runtime, rows, columns, 0
        self.ends = [row.stored + len(places) for row, places in zip(rows, real)]
        self.parts: list[Part] = []
        began = time.perf_counter()
        decoding: list[int] = []
        for number, (row, places, end) in enumerate(zip(rows, real, self.ends)):
            if end == row.stored:
                continue
            row.report.schedule(began)
            runtime.memories[row.id].kv.reserve(end)
            if columns == 1 and row.stored and row.stored >= row.prefill[1] and row.under == policy:
                decoding.append(number)
                continue
            row.under = policy
            if row.stored >= row.prefill[1]:  # a prompt begins, or a turn
                row.prefill = row.stored, end if total is None else total[number]
                row.after_cut = row.seen > row.stored
                row.report.prompt_tokens = row.prefill[1]
                runtime.memories.begin_turn(row.id, row.stored, keeps=True)
                row.decodes_from = None
            if end > row.prefill[1]:
                raise SaccadeError(
                    f"a chunk ends at token {end} of a prompt of {row.prefill[1]}; give prefill_chunk_size together "
                    "with the prompt's attention_mask"
                )
            self._read(running, number, policy, places, end)
        if decoding:
            self._decode(running, decoding, policy)

    def _read(self, running: Running, number: int, policy: Policy, places: Places, end: int) -> None:
        """Plan a prompt's rows in the engine's chunks: what a sparse method chooses hangs on them."""
        row = self.rows[number]
        self.runtime.memories[row.id].begin_step(row.stored, False)
        first, last = row.prefill
        chunk = running.config.chunk if policy.selects_by_chunk else running.config.dense_chunk
        start = row.stored
        while start < end:
            stop = min(end, first + (start - first) // chunk * chunk + chunk)
            span = first, last, last, row.after_cut
            one = ScheduledRequest(row.request, row.id, start, stop, "prefill", policy, *span)
            some = slice(start - row.stored, stop - row.stored)
            here = places[some]
            self._plan(running, [one], [number], here)
            start = stop

    def _decode(self, running: Running, numbers: Sequence[int], policy: Policy) -> None:
        scheduled = []
        for number in numbers:
            row, memory = self.rows[number], self.runtime.memories[self.rows[number].id]
            if row.seen > row.stored and memory.has_state:
                raise SaccadeError(
                    f"decode after crop: '{policy.decode.text}' has learnt from what was cut off; give several tokens, "
                    "a prompt, or decode densely"
                )
            memory.begin_step(row.stored, True)
            if row.decodes_from is None:
                row.decodes_from = row.stored
            row.report.token()
            at, stop = row.stored, row.stored + 1
            scheduled.append(
                ScheduledRequest(row.request, row.id, at, stop, "decode", policy, row.decodes_from, stop, stop)
            )
        self._plan(running, scheduled, numbers, range(1))

    def _plan(
        self, running: Running, scheduled: Sequence[ScheduledRequest], numbers: Sequence[int], places: Places
    ) -> None:
        starts = [0]
        for one in scheduled:
            starts.append(starts[-1] + one.length)
        unread = torch.empty(0, dtype=torch.int64)  # transformers embeds and rotates
        step = StepInput(tuple(scheduled), unread, unread, tuple(starts))
        result = StepResult({one.request_id: RequestResult.of(one) for one in scheduled})
        attention = running.backend.plan(step, self.runtime.memories, result, all_rows=True).attention
        self.parts.append(Part(attention, scheduled, result, numbers, places))

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        """Store and attend at ``layer``: [batch, rows, heads, head_dim], zeros for padding."""
        if layer != self.next or q.shape[2] != self.columns or q.shape[0] != len(self.rows):
            raise SaccadeError(
                f"layer {layer} attends over rows of shape {tuple(q.shape)} where layer {self.next} of a pass over "
                f"{len(self.rows)} x {self.columns} rows is due; every layer must see the same rows, in order"
            )
        self.next += 1
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
        for part in self.parts:
            part.run(layer, q, k, v, spec, out)
        return out

    @property
    def over(self) -> bool:
        return self.next == self.runtime.layers

    def finish(self) -> None:
        """All layers have run."""
        ended = time.perf_counter()
        for part in self.parts:
            part.settle()
            for one, number in zip(part.scheduled, part.rows):
                self.rows[number].report.take(one, part.result.requests[one.request_id], ended)
        for row, end in zip(self.rows, self.ends):
            if end > row.stored:
                self.runtime.memories[row.id].end_step()
                row.stored = row.seen = end


def _index(places: Places) -> slice | list[int]:
    """A slice copies nothing."""
    return slice(places.start, places.stop) if isinstance(places, range) else places
