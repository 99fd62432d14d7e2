"""Where layers that keep a state find it on a GPU: slots of a pool, whose numbers kernels read on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from saccade.kv.state_journal import Again


@dataclass(frozen=True, eq=False)
class Slots:
    """One layer's part of the states of some sequences. ``pool`` [slots, ...], each slot's values one after another;
    ``reads``, ``writes`` int64 [sequences]: the slots that hold each sequence's state, and that take the next one (the
    same, or one that is not read). -1: a row of padding, which has no state. ``notes``: of one sequence, where
    kernels note what they did, if that may have to be done again."""

    pool: Tensor
    reads: Tensor
    writes: Tensor
    notes: list[Again] | None = None

    def only(self, slot: int) -> Slots:
        """Of one sequence, whose state is in ``slot`` and stays there."""
        where = self.reads.new_full((1,), slot)
        return replace(self, reads=where, writes=where, notes=None)


@dataclass(frozen=True, eq=False)
class NewRows:
    """Rows [sequences, channels, tokens] that come behind those that ``slots`` hold of each sequence."""

    rows: Tensor
    slots: Slots

    @property
    def notes(self) -> list[Again] | None:
        return self.slots.notes

    def only(self, slot: int) -> NewRows:
        """See Slots."""
        return replace(self, slots=self.slots.only(slot))

    def narrow(self, dimension: int, start: int, length: int) -> NewRows:
        """As of a tensor."""
        return replace(self, rows=self.rows.narrow(dimension, start, length))
