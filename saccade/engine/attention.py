"""How attention is supplied to a step: a backend plans it once, then runs it layer by layer (FlashInfer's shape)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from saccade.engine.audit import RowAudit
from saccade.engine.bounds import Bounds
from saccade.engine.clock import Clock
from saccade.engine.memory import SequenceMemory
from saccade.engine.observe import AttentionCall, LogitsObserver, Observer
from saccade.engine.pulse import Pulse
from saccade.engine.step import RequestResult, StepInput
from saccade.models.interface import LayerAttention


@dataclass
class Watch:
    """Who looks on: they see what every step runs, on whichever backend."""

    observer: Observer | None = None  # see engine.observe
    logits: LogitsObserver | None = None  # see engine.observe; the worker shows decode rows to it
    clock: Clock | None = None  # see engine.clock
    maps: Mapping[int, Observer] = field(default_factory=dict)  # those of single requests in this step, by id
    audits: Mapping[int, RowAudit] = field(default_factory=dict)  # of this step's rows, by request; they change nothing
    audited: frozenset[int] = frozenset()  # requests of this step that are audited now and then
    replays: frozenset[int] = frozenset()  # those whose rows the device also runs densely
    replays_next: bool = False  # whether it will do so in the next step
    bounds: Mapping[int, Bounds] = field(default_factory=dict)  # of this step's rows, by request; on the host alone
    pulse: Pulse = field(default_factory=Pulse)  # whether the engine's thread gets on

    def begin(self, maps: Mapping[int, Observer]) -> None:
        """A step begins, with the ``maps`` of its requests, and so far nothing else of single requests."""
        self.maps, self.audits, self.audited, self.bounds = maps, {}, frozenset(), {}
        self.replays, self.replays_next = frozenset(), False

    @property
    def idle(self) -> bool:
        """Whether nobody looks on."""
        return self.clock is None and self.logits is None and not self.sees_calls

    @property
    def sees_calls(self) -> bool:
        """Whether anybody looks at calls."""
        return self.observer is not None or bool(self.maps)

    def wants_all(self, request: int) -> bool:
        """Whether somebody looks at every row of a request."""
        return self.observer is not None or request in self.maps

    def see(self, call: AttentionCall) -> None:
        """Show a call to those who look at calls. What they raise fails the call's request."""
        if self.observer is not None:
            self.observer(call)
        if call.request in self.maps:
            self.maps[call.request](call)


class StepAttention(Protocol):
    """The attention of one planned step; an attention context of the layer loop (models.interface)."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        """Store the new rows' ``k``, ``v`` [kv_heads, rows, head_dim] and attend for ``q`` [heads, rows, head_dim]."""
        ...

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Take the keys and values of rows that skip ``layer``."""
        ...


class AttentionBackend(Protocol):
    """Serves steps on one kind of device. ``results`` are filled in while the step runs, by request id."""

    def serves(self, step: StepInput, index: int, memory: SequenceMemory) -> str | None:
        """Why request ``index`` of a step cannot be served here; None where it can."""
        ...

    def plan(
        self, step: StepInput, memories: Mapping[int, SequenceMemory], results: dict[int, RequestResult]
    ) -> StepAttention:
        """What the layers of this step will read, as far as that can be known before it runs. ``memories`` by sequence
        id."""
        ...
