"""How attention is supplied to a step: a backend plans it once, then runs it layer by layer (FlashInfer's shape)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.steps.step import StepInput, StepResult
from saccade.engine.watch.audit import RowAudit
from saccade.engine.watch.bounds import Bounds
from saccade.engine.watch.clock import Clock
from saccade.engine.watch.observe import AttentionCall, LogitsObserver, Observer
from saccade.engine.watch.pulse import Pulse


@dataclass
class Watch:
    """Who looks on: they see what every step runs, on whichever backend."""

    observer: Observer | None = None  # see engine.observe
    logits: LogitsObserver | None = None  # see engine.observe; backends show decode rows to it
    clock: Clock | None = None  # see engine.clock
    maps: Mapping[int, Observer] = field(default_factory=dict)  # those of single requests in this step, by id
    audits: Mapping[int, RowAudit] = field(default_factory=dict)  # of this step's rows, by request; they change nothing
    audited: frozenset[int] = frozenset()  # requests of this step that are audited now and then
    replays: frozenset[int] = frozenset()  # those whose rows the device also runs densely
    replays_next: bool = False  # whether it will do so in the next step
    bounds: Mapping[int, Bounds] = field(default_factory=dict)  # of this step's rows, by request; on the host alone
    pulse: Pulse = field(default_factory=Pulse)  # whether the engine's thread gets on

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """No observer is shown what runs within the block: it is none of the requests that one was set to watch."""
        before = self.observer, self.logits
        self.observer = self.logits = None
        try:
            yield
        finally:
            self.observer, self.logits = before

    def begin(self, maps: Mapping[int, Observer]) -> None:
        """A step begins, with the ``maps`` of its requests, and so far nothing else of single requests."""
        self.maps, self.audits, self.audited, self.bounds = maps, {}, frozenset(), {}
        self.replays, self.replays_next = frozenset(), False

    @property
    def idle(self) -> bool:
        """Whether there is no observer."""
        return self.logits is None and not self.looks_within

    @property
    def looks_within(self) -> bool:
        """Whether a clock or an observer looks at what happens within a step. Logits are there once it is over."""
        return self.clock is not None or self.sees_calls

    @property
    def sees_calls(self) -> bool:
        """Whether an observer looks at calls."""
        return self.observer is not None or bool(self.maps)

    def wants_all(self, request: int) -> bool:
        """Whether an observer looks at every row of a request."""
        return self.observer is not None or request in self.maps

    def see(self, call: AttentionCall) -> None:
        """Show a call to those who look at calls. What they raise fails the call's request."""
        if self.observer is not None:
            self.observer(call)
        if call.request in self.maps:
            self.maps[call.request](call)


class StepFailedError(RuntimeError):
    """A planned step did not run: nothing of it counts as stored, and another backend must serve its requests."""


class StepShortError(StepFailedError):
    """Nothing of a step holds because the device had no room for all that it read."""


class PlannedStep(Protocol):
    """Requests of a step whose attention a backend has planned, as far as it is known before it runs."""

    def steps(self) -> Iterable[int]:
        """Run all layers and write down what the rows did, stopping between layers if need be. Each layer's queries,
        keys and values go to the backend's attention context (models.interface.AttentionContext). StepFailedError:
        others must serve the requests; what else it raises is the fault of one of them."""
        ...


class AttentionBackend(Protocol):
    """Serves requests of steps on one kind of device. The worker asks one backend after the other."""

    def serves(self, step: StepInput, index: int, memory: SequenceMemory) -> str | None:
        """Why request ``index`` of a step cannot be served here; None where it can."""
        ...

    def parts(
        self, step: StepInput, which: Sequence[int], memories: Mapping[int, SequenceMemory]
    ) -> Sequence[Sequence[int]]:
        """The served requests ``which`` in as many planned steps as they need, rising numbers in each."""
        ...

    def plan(
        self,
        step: StepInput,
        memories: Mapping[int, SequenceMemory],
        result: StepResult,
        times: int = 1,
        goes_on: bool = False,
    ) -> PlannedStep:
        """The whole of ``step``, planned; ``memories`` by sequence id. ``result`` is filled in while it runs. ``times``
        and ``goes_on``: see worker.Worker.run."""
        ...
