"""How the rows of a batched step stand in its buffers: grouped by the forms of their plans, padded to few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from saccade.engine.attention import Watch
from saccade.engine.device import prefill
from saccade.engine.device.attention import Group
from saccade.engine.device.graphs import Key, StepKinds, rounded_up
from saccade.engine.device.plans import DevicePlans
from saccade.engine.device.rooms import EACH
from saccade.engine.device.tiers import DeviceTiers
from saccade.engine.device.watch import PlacedRow
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.steps.step import RequestResult, StepInput
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
