"""Selections that leave out keys of another one, for kinds that cannot say so themselves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from saccade.selection.base import Selection, Tokens
from saccade.selection.wrapped import Wrapped


@dataclass(frozen=True, eq=False)
class Narrowed(Wrapped):
    """What ``inner`` selects and ``allowed`` lets through. A row that would lose its last key keeps its own."""

    def allowed(self, unit: int, start: int, stop: int) -> Tensor:
        """Bool [stop - start, k_len]: what these rows may see."""
        raise NotImplementedError

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        chosen = self.inner.row_mask(self._inner_unit(unit), start, stop)
        seen = chosen & self.allowed(unit, start, stop).to(chosen.device)
        emptied = chosen.any(1) & ~seen.any(1)
        seen[emptied, self.shape.to(seen.device).rows[start:stop][emptied]] = True
        return seen

    def row_bias(self, unit: int, start: int, stop: int) -> Tensor | None:
        return self.inner.row_bias(self._inner_unit(unit), start, stop)

    def _inner_unit(self, unit: int) -> int:
        return unit * self.inner.units // self.units


def plain(selection: Narrowed) -> Selection:
    """The same for one row as token lists, which have kernels and know what they read; others, and what biases its
    logits, as it is."""
    if selection.shape.q_len > 1 or selection.row_bias(0, 0, 1) is not None:
        return selection
    return Tokens.from_mask(selection.shape, selection.unit_mask())
