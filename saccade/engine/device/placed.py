"""The rows of a batched step: how they stand in its buffers, grouped by the forms of their plans and padded to few
numbers, and what they have stored and read, added up by their requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from saccade.engine.attention import Watch
from saccade.engine.device import prefill
from saccade.engine.device.attention import Group
from saccade.engine.device.graphs import Key, StepKind, StepKinds, rounded_up
from saccade.engine.device.plans import DevicePlans
from saccade.engine.device.rooms import EACH, RowRooms
from saccade.engine.device.tiers import DeviceTiers
from saccade.engine.device.watch import PlacedRow
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.steps.paths import EAGER, RECORDED, Path
from saccade.engine.steps.step import RequestResult, StepInput
from saccade.engine.watch.phase_stats import SLIDES, ran_dense
from saccade.errors import failure
from saccade.models.interface import ModelSpec
from saccade.ops.triton.common import pad


class Arranged(NamedTuple):
    """The rows of a step, None for padding, the key of its kind, and which rows have one form."""

    placed: list[PlacedRow | None]
    key: Key
    groups: tuple[Group, ...]


class Arranging:
    """Arranges steps. ``covers``: a step may run as a larger one that is recorded, with padding for its other rows."""

    def __init__(
        self, plans: DevicePlans, tiers: DeviceTiers, kinds: StepKinds, watch: Watch, covers: bool = True
    ) -> None:
        self.covers, self._plans, self._tiers, self._kinds, self._watch = covers, plans, tiers, kinds, watch

    def step(
        self, step: StepInput, memories: Mapping[int, SequenceMemory], results: dict[int, RequestResult], times: int
    ) -> Arranged:
        """The rows of ``step``, which runs ``times`` times: one form after the other."""
        if step.scheduled[0].phase == "prefill":
            return self.prefill(step, memories, results)
        grouped: dict[int, list[PlacedRow | None]] = {}
        each = pad(max(one.length for one in step.scheduled), 1)
        for one in step.scheduled:
            plans, policy = self._plans, one.policy
            planned = plans.of(policy, one.stop) if each == 1 else plans.verifying(policy, each, one.stop)
            assert planned.plan is not None
            memory, result = memories[one.sequence_id], results[one.request_id]
            row = PlacedRow(one, memory, planned.plan, result, planned.cones, planned.acting)
            grouped.setdefault(planned.form, []).append(row)
        sizes = tuple((form, pad(len(grouped[form]), 1)) for form in sorted(grouped))
        rows = [row for own in grouped.values() for row in own if row is not None]
        absent = self._tiers.absent(rows[0].kv.pool) and all(row.plan.listed for row in rows)
        tapped = not absent and each == times == 1 and not self._watch.audited.isdisjoint(step.request_ids)
        key = Key(sizes, rounded_up(max(step.seq_lens) + times - 1), absent, tapped)
        if not absent and self._watch.idle:
            key = self._covered(key)
        forms = self._plans.forms
        placed: list[PlacedRow | None] = []
        groups = []
        for form, count in key.sizes:
            own = grouped.get(form, [])
            groups.append(Group(forms[form], len(placed), count))
            placed += own + [None] * (count - len(own))
        return Arranged(placed, key, tuple(groups))

    def prefill(
        self, step: StepInput, memories: Mapping[int, SequenceMemory], results: dict[int, RequestResult]
    ) -> Arranged:
        """The pieces of chunks, padded likewise."""
        plan = self._plans.prefilling(EACH)
        placed: list[PlacedRow | None] = []
        for one in step.scheduled:
            memory, result = memories[one.sequence_id], results[one.request_id]
            memory.states  # noqa: B018  (back on the host, as they were before these rows)
            placed += [PlacedRow(piece, memory, plan, result) for piece in prefill.pieces(one)]
        form, learns = self._plans.forms.index(plan.form), any(map(prefill.learns, step.scheduled))
        longest = rounded_up(max(step.seq_lens))
        key = self._covered(Key(((form, pad(len(placed), 1)),), longest, tapped=learns, prefill=True))
        return Arranged(placed + [None] * (key.rows - len(placed)), key, (Group(plan.form, 0, key.rows),))

    def _covered(self, key: Key) -> Key:
        """That of a larger step that is recorded, where there is one."""
        cover = self._kinds.cover(key) if self.covers else None
        return key if cover is None else cover[0]


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
