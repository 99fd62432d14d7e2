"""How a device serves a decode method: a :class:`DevicePlan` has one reading (selection/readings.py) for each layer.

Requests whose plans have one form share launches and graphs, whatever their numbers are. What a row remembers between
steps lies in the state of its sequence (methods/device_state.py). The step's buffers hold only its numbers and pointers
to it, as they do for block summaries, so that a graph survives a change of rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from saccade.errors import SaccadeError
from saccade.selection.forms import LABELS, Numbers, PlanSpec, Summarized
from saccade.selection.readings import Choice, Ends, Everything, Reading


class Named(Protocol):
    """A method, as far as a plan knows one."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class DevicePlan:
    """What each layer reads under one method: ``name`` is its text, options included, and ``method`` its name alone.
    Layers that read blocks do so by one summary and block size, which their rows keep; SaccadeError if they do not."""

    name: str
    method: str
    layers: tuple[Reading, ...]

    def __post_init__(self) -> None:
        summaries = {(one.blocks.summary, one.blocks.size) for one in self.layers if one.blocks is not None}
        if len(summaries) > 1:
            raise SaccadeError(f"the layers of a device plan share one kind of block summary, got {sorted(summaries)}")

    @classmethod
    def of(cls, method: Named, layers: Iterable[Reading]) -> DevicePlan:
        return cls(method.text, method.name, tuple(layers))

    @classmethod
    def alike(cls, method: Named, spec: PlanSpec, reading: Reading, dense_layers: int = 0) -> DevicePlan:
        """``reading`` in every layer but the first ``dense_layers``, which read everything, and but those that have a
        window, which read their last keys: ``spec`` has the windows that rule rows of one level
        (selection/levels.py)."""
        dense = min(dense_layers, spec.layers)
        own = [Everything()] * dense + [reading] * (spec.layers - dense)
        return cls.of(method, [one if size is None else Ends(0, size) for one, size in zip(own, spec.windows)])

    @cached_property
    def form(self) -> tuple[Reading, ...]:
        """What a group of rows and its graph share: the layers without their numbers."""
        forms = {one: one.form for one in set(self.layers)}
        return tuple(forms[one] for one in self.layers)

    @cached_property
    def numbers(self) -> list[Numbers]:
        """Each layer's."""
        return [one.numbers for one in self.layers]

    @cached_property
    def choice(self) -> Choice | None:
        """The first layer's that chooses blocks, if any."""
        return next((one.choice for one in self.layers if one.choice is not None), None)

    @cached_property
    def blocks(self) -> Summarized | None:
        """The blocks that its readings know by more than their keys, if any."""
        return next((one.blocks for one in self.layers if one.blocks is not None), None)

    @cached_property
    def summarized(self) -> Summarized | None:
        """The block summaries that rows keep, if any."""
        return stored(self.layers)

    @cached_property
    def keeps(self) -> bool:
        """Whether rows have a device state, to whose numbers and memory their buffers point."""
        return not self.listed or (self.blocks is not None and self.summarized is None)

    @cached_property
    def listed(self) -> bool:
        """Whether it is known before anything is read which keys a layer reads, or which first."""
        return all(one.listed for one in self.layers)

    @cached_property
    def ruled(self) -> bool:
        """Whether the device decides how much is read, and counts it."""
        return any(one.ruled for one in self.layers)


def stored(layers: Iterable[Reading]) -> Summarized | None:
    """The block summaries that the rows of ``layers`` keep in their storage, if any."""
    return next((one.blocks for one in layers if one.blocks is not None and one.blocks.summary != LABELS), None)
