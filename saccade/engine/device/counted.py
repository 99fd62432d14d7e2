"""What a batched step has stored and read, added up by its requests and their plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from saccade.engine.attention import Watch
from saccade.engine.device import prefill
from saccade.engine.device.graphs import Key, StepKind, StepKinds
from saccade.engine.device.rooms import EACH, RowRooms
from saccade.engine.device.watch import PlacedRow
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.steps.paths import EAGER, RECORDED, Path
from saccade.engine.steps.step import RequestResult, StepInput
from saccade.engine.watch.phase_stats import SLIDES, ran_dense
from saccade.errors import failure
from saccade.models.interface import ModelSpec


class Counting:
    """Counts the rows of steps, whose buffers are ``rooms``'."""

    def __init__(self, rooms: RowRooms, kinds: StepKinds, watch: Watch, spec: ModelSpec) -> None:
        self._rooms, self._kinds, self._watch, self._spec = rooms, kinds, watch, spec

    def row(self, number: int, row: PlacedRow, times: int = 1) -> None:
        """The row is stored; its counts are added up by the request and its plan. With ``times=-1`` it is not."""
        one, choice = row.scheduled, row.plan.summarized
        row.kv.appended(times * one.length)
        row.result.path = Path(EAGER if self._watch.looks_within else RECORDED)
        if one.phase == "prefill":
            return
        if choice is not None and one.stop // choice.size > one.start // choice.size:
            row.kv.summarized(choice.summary, choice.size)
        if one.together:
            verified = self._rooms.counts.of(one.request_id, row.plan)
            row.result.late[row.plan.name] = verified
            row.result.stay = partial(verified.add_first, one.start, "triton")
            return
        counts = self._rooms.counts.rows[number]
        if row.acting is not None and 0 not in row.acting:
            row.result.note(SLIDES)  # notes stand as the layers do
        whole = row.plan.keeps and self._rooms.stored(row, one.stop if times > 0 else one.start)
        backend = "triton (eager)" if self._watch.looks_within else "triton"
        everything = counts.add(one.stop, backend, times, one.start - one.span_start, whole)
        if everything and not one.policy.decode.means_dense:
            row.result.note(ran_dense("decode", row.plan.method))
        if row.acting is not None:
            row.result.note(SLIDES)
        if self._kinds.note is not None:
            row.result.note(self._kinds.note)
        row.result.late[row.plan.name] = counts

    @torch.inference_mode()
    def learn(
        self, step: StepInput, memories: Mapping[int, SequenceMemory], results: dict[int, RequestResult], key: Key
    ) -> None:
        """Count what a prefill read, and let decode methods learn from it."""
        asked, first = self._rooms.buffers[True].asked if key.tapped else None, 0
        for one in step.scheduled:
            result = results[one.request_id]
            result.note_of(self._kinds.note)
            prefill.settle(one, memories[one.sequence_id], result, self._spec, asked, first)
            first += EACH * len(prefill.pieces(one))

    def show(self, kind: StepKind, placed: Sequence[PlacedRow | None]) -> None:
        """Show the logits of decode rows to those who look at them. What they raise fails the request alone."""
        looks = self._watch.logits
        for number, row in enumerate(placed if looks is not None else ()):
            if row is None or row.result.error is not None or row.scheduled.phase != "decode":
                continue
            assert looks is not None
            try:
                looks(row.scheduled.request_id, row.scheduled.start, kind.logits[number].clone())  # replays share it
            except Exception as error:  # one request's failure must not take the others down
                row.result.error, row.result.error_type = failure(error, "decode")
