"""LFPS in decode steps of many rows on a CPU: what csrc/listing.h is told of each layer's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from saccade.methods.device_state import Opening
from saccade.methods.host_state import HostState
from saccade.methods.lfps.cpu import table_fields
from saccade.methods.lfps.recorded import AHEAD, BYPASSES
from saccade.methods.lfps.stand_ins import multiples
from saccade.methods.lfps.tables import GATES
from saccade.ops.cpu_structs import native
from saccade.selection.plan import Summarized

if TYPE_CHECKING:
    from saccade.methods.lfps.method import LFPS


class HostTables(HostState):
    """Of ``LFPSState``, whose tables the kernels write to where they are."""

    def __init__(self, opening: Opening, method: LFPS) -> None:
        self._method, self._units = method, opening.states[0].tables.units
        self._first = opening.states[0].tables.first
        self._everything = method.a is None and method.gate == "off"
        # Heads that choose together do so by shares of weights, which their sinks have a part in; bypass="mean" reads
        # none.
        alone = self._units == opening.spec.heads and not self._everything and method.bypass != "mean"
        self._apart = self._first if opening.apart and alone else 0
        self._whole = False
        self._places = multiples(method.probes)
        self._kept = [(one.mean_key, one.mean_value, one.spread) for one in opening.states]
        self._kept = [tuple(part.float().contiguous() for part in kept) for kept in self._kept]
        self.states = list(opening.states)
        self._make_room(opening.length)
        super().__init__(opening)

    @classmethod
    def serves(cls, method: LFPS, opening: Opening) -> bool:
        """Whether the kernels do what the options ask for, and every layer knows its tables."""
        usual = method.slash_shift_on_read and method.bypass_shift and method.read_local and not method.running_means
        return usual and not opening.windowed and all(state is not None for state in opening.states)

    def known(self, layer: int) -> dict[str, Any]:
        tables = self.states[layer].tables
        mean_key, mean_value, spread = self._kept[layer]
        return {
            "tables": native.ScoreTables(**table_fields(tables)),
            "mean_key": mean_key.data_ptr(),
            "mean_value": mean_value.data_ptr(),
            "spread": spread.data_ptr(),
            "steps": tables.steps,
        }

    def keys(self, length: int) -> Any | None:
        method, first = self._method, self._first
        keys = length - first
        self._whole = keys <= method.budget(keys)
        self.apart = 0 if self._whole else self._apart
        self.summarized = None if self._whole or not method.blocks else Summarized(method.block_size, "stored_mean")
        if self._whole:  # everything is read, and learnt from: nobody is bypassed
            return native.ListedKeys(
                units=self._units,
                sinks=first,
                local=0,
                best=keys,
                tables=True,
                unbounded=True,
                gate=GATES.index("off"),
                decay=method.r,
            )
        everything = self._everything
        return native.ListedKeys(
            units=self._units,
            sinks=first,
            local=min(method.local, keys),
            best=method.best(keys),
            tables=True,
            a=0.0 if method.a is None else method.a,
            unbounded=method.a is None,
            gate=GATES.index(method.gate),
            before=method.before,
            after=method.after,
            blocks=0 if everything else method.blocks,
            block_size=method.block_size,
            bypass_local=method.local,
            probes=0 if everything or method.rest is None else method.probes,
            places=self._places.data_ptr(),
            epsilon=method.epsilon,
            decay=method.r,
            bypass=BYPASSES.index(method.bypass),
            apart=self.apart > 0,
        )

    def done(self, length: int) -> None:
        if self._whole:  # no key was scored to choose
            self.tally[:, self.tally.shape[1] - 3] = 0.0
        super().done(length)

    @torch.inference_mode()
    def grow(self, length: int) -> None:
        self._make_room(length)
        self.lay_out()

    @torch.inference_mode()
    def settle(self, length: int) -> list[Any]:
        for state in self.states:
            state.seen, state.idle = length - 1, None
            state.tables.row.fill_(length - 1)
            state.tables.steps += self.steps
        self.steps = 0
        return self.states

    def _make_room(self, length: int) -> None:
        self.room = length + AHEAD
        for state in self.states:
            state.tables.grow(self.room - self._first)
