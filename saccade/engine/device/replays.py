"""Dense replays of a GPU's decode steps: recorded dense steps over the rows that lie in the buffers, each launched
before the step that it is compared with. That step overwrites what the replay stored, and the replay's tokens are no
part of the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from saccade.copied import Copied
from saccade.engine.device.attention import Group
from saccade.engine.device.graphs import Key, StepKind, StepKinds
from saccade.engine.device.plans import DevicePlans
from saccade.engine.device.rows import RowBuffers
from saccade.engine.device.watch import PlacedRow
from saccade.engine.watch.estimates import departures
from saccade.kv.blocks import BlockManager
from saccade.machine import sent
from saccade.ops.triton.common import pad

Kind = Callable[[BlockManager, Key, tuple[Group, ...], RowBuffers], tuple[StepKind, Callable[[], None]]]


class DenseReplays:
    """``kind`` says what launches a step over buffers; ``kinds`` keep them."""

    def __init__(self, plans: DevicePlans, kinds: StepKinds, kind: Kind) -> None:
        self._plans, self._kinds, self._kind = plans, kinds, kind

    @torch.inference_mode()
    def run(self, pool: BlockManager, rows: int, longest: int, buffers: RowBuffers, length: int) -> Tensor:
        """Launch a dense step of the first ``rows`` rows, all of the level of ``length`` keys: its logits fp32 [>=
        rows, vocab]."""
        plan = self._plans.replaying(length).plan
        assert plan is not None
        group = Group(plan.form, 0, pad(rows, 1))
        key = Key(((self._plans.forms.index(plan.form), group.rows),), longest)
        kind, forward = self._kind(pool, key, (group,), buffers)
        self._kinds.launch(kind, forward, watched=False)
        return kind.logits.clone()  # recordings share their memory


class Compared:
    """The logits [rows, vocab] of a step that has been launched beside those of its replay, on their way to the host.
    ``rows``: by their numbers in both, those that are compared."""

    def __init__(self, rows: Iterable[tuple[int, PlacedRow]], own: Tensor, dense: Tensor) -> None:
        self._rows = list(rows)
        at = sent(torch.tensor([number for number, _ in self._rows], device="cpu"), own.device)
        self._copied = Copied(departures(own[at], dense[at]))

    def settle(self) -> None:
        """The step holds: write down what was found."""
        found: list[list[float]] = self._copied.wait()
        for (_, row), (agrees, divergence) in zip(self._rows, found):
            row.result.replayed = bool(agrees), divergence
