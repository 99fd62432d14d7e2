"""The row backend: methods select for each request and layer, ops read. It serves every step, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.rows.attention import RowAttention
from saccade.engine.rows.calls import RequestRows, Setting
from saccade.engine.rows.decode_rows import JoinedRows
from saccade.engine.rows.freezing import frozen_rows
from saccade.engine.rows.hosted import Hosting
from saccade.engine.rows.layers_pass import LayersPass
from saccade.engine.rows.plans import FixedPlans
from saccade.engine.rows.resolved import resolved
from saccade.engine.rows.tiers import HeldRows
from saccade.engine.steps.step import StepInput, StepResult, results_of
from saccade.models.interface import FrozenRows
from saccade.models.runner import HFRunner
from saccade.ops import cpu_rows

ONE_BY_ONE = "its backend, or a GPU, has no call for rows of many requests"


class RowBackend:
    """Serves every request, in one pass of ``runner`` (see engine.attention.AttentionBackend)."""

    def __init__(self, setting: Setting, runner: HFRunner) -> None:
        self.setting, self.runner = setting, runner
        llama = getattr(runner, "llama", None)
        self._own_products = llama is not None and llama.has_row_kernels  # on few rows, by C++ kernels
        self.fixed = FixedPlans(setting)
        self._held = HeldRows()
        self._hosting = Hosting(setting, self.fixed)

    def done(self) -> None:
        """A step is over: what it kept in memory may leave."""
        self._held.release()

    def serves(self, step: StepInput, index: int, memory: SequenceMemory) -> str | None:
        """Every request can be served here."""
        return None

    def parts(
        self, step: StepInput, which: Sequence[int], memories: Mapping[int, SequenceMemory]
    ) -> list[Sequence[int]]:
        """All of them together."""
        return [which] if which else []

    @torch.inference_mode()  # planning makes summaries, too
    def plan(
        self,
        step: StepInput,
        memories: Mapping[int, SequenceMemory],
        result: StepResult,
        times: int = 1,
        goes_on: bool = False,
        all_rows: bool = False,
    ) -> LayersPass:
        """See AttentionBackend. A step runs once, and none is launched ahead. ``all_rows``: the caller, which runs the
        layers, reads the outputs of all rows."""
        rows = [
            RequestRows(one, memories[one.sequence_id], results_of(result.requests, one), first)
            for one, first in zip(step.scheduled, step.query_start_loc)
        ]
        setting, spec = self.setting, self.setting.spec
        self.done()
        wants_all = setting.watch.wants_all if spec.ends_attending and not all_rows else _all_rows
        frozen = frozen_rows(step.scheduled, spec.layers, wants_all)
        hosted = self._hosting.gather(rows, frozen is None)
        attention = RowAttention(setting, rows, frozen, hosted=hosted, hosting=self._hosting)
        gone = {id(one) for part in hosted for one in part.requests}
        joined = [one for one in rows if (one.decodes or one.together) and id(one) not in gone]
        storage = joined[0].memory.kv.pool.storage if joined else None
        if storage is None or not cpu_rows.stores(storage.k, storage.format, setting.backend):
            attention.why_apart = ONE_BY_ONE
        elif frozen is not None and joined[-1].first > _earliest(frozen, spec.layers):
            attention.why_apart = "rows before it are frozen in some layers"  # it moves up where they are left out
        else:
            held = self._held.gather(joined, [one for one in rows if not (one.decodes or one.together)])
            attention.together = set(map(id, held))
            left = [one for one in joined if id(one) not in attention.together]
            attention.resolved = resolved(setting, self.fixed, left, self._own_products) if left else {}
            attention.joined = JoinedRows(setting, self.fixed, held, self._own_products) if held else None
        return LayersPass(self.runner, step, result, attention, setting.watch.logits)


def _earliest(frozen: FrozenRows, layers: int) -> int:
    """The first row that skips a layer."""
    return int((frozen.first < layers).nonzero()[0])


def _all_rows(request: int) -> bool:
    """That every row's output is read, by layers behind the last that attends."""
    return True
