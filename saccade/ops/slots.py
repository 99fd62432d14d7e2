"""Where layers that keep a state find it on a GPU: slots of a pool, whose numbers kernels read on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Slots:
    """One layer's part of the states of some sequences. ``pool`` [slots, ...], each slot's values one after another;
    ``reads``, ``writes`` int64 [sequences]: the slots that hold each sequence's state, and that take the next one (the
    same, or one that nobody reads). -1: a row of padding, which has no state."""

    pool: Tensor
    reads: Tensor
    writes: Tensor


@dataclass(frozen=True, eq=False)
class NewRows:
    """Rows [sequences, channels, tokens] that come behind those that ``slots`` hold of each sequence."""

    rows: Tensor
    slots: Slots
