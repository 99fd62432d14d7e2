"""Candidates: keys of which the op reads the best by exact logit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection.base import Selection, Shape, Tokens
from saccade.selection.csr import check_below, check_csr, offsets_of_lists


@dataclass(frozen=True, eq=False)
class Candidates(Selection):
    """Per unit a list of candidate keys, of which the op scores all and reads the ``k`` best. Decode only.

    ``offsets`` int64 [units + 1], ``indices`` int32 [nnz]: the candidates; ``k`` int64 [units]: how many of them are
    read. A unit with ``full`` (bool [units]) has every key for a candidate but those ``hidden`` by a window (from, to),
    and an empty list. The first ``sinks`` and the last ``local`` keys are forced: read beside the ``k``, and never
    among the listed candidates.

    One query head ranks by logit; several that share a unit by the mean of their softmax weights over the candidates
    and the forced keys; ties go to the lower index. Heads that are ``idle`` (bool [heads]) read the first ``idle_keys``
    (at most ``sinks``) keys alone and have no say in their unit's ranking.

    ``rest`` stands for keys that a head does not read: (``lse`` float32 [heads], ``value`` float32 [heads, head_dim]),
    an estimate of their part of the attention, merged into the result by log-sum-exp; -inf where there is none.

    As a selection it stands for everything it may read; the op says what it read as Tokens.
    """

    shape: Shape
    offsets: Tensor
    indices: Tensor
    k: Tensor
    sinks: int = 0
    local: int = 0
    full: Tensor | None = None
    idle: Tensor | None = None
    idle_keys: int = 0
    rest: tuple[Tensor, Tensor] | None = None
    hidden: tuple[int, int] = (0, 0)

    @classmethod
    def all_keys(cls, shape: Shape, units: int, k: int, sinks: int = 0, local: int = 0) -> Candidates:
        """Every key is a candidate: exact top-k. ``k`` does not count the forced keys."""
        return cls(
            shape,
            torch.zeros(units + 1, dtype=torch.int64, device=shape.device),
            torch.empty(0, dtype=torch.int32, device=shape.device),
            torch.full((units,), k, device=shape.device),
            sinks,
            local,
            torch.ones(units, dtype=torch.bool, device=shape.device),
        )

    @property
    def units(self) -> int:
        return self.k.numel()

    @property
    def forced(self) -> tuple[int, int]:
        """Keys ``0 .. first - 1`` and ``last .. k_len - 1`` are forced."""
        first = min(self.sinks, self.shape.k_len)
        return first, max(first, self.shape.k_len - self.local)

    def listed(self, unit: int) -> Tensor:
        """The candidates of a unit, forced keys left out: int64, rising."""
        first, last = self.forced
        if self.full is not None and bool(self.full[unit]):
            keys = torch.arange(first, last, device=self.offsets.device)
            return keys[(keys < self.hidden[0]) | (keys >= self.hidden[1])]
        return self.indices[int(self.offsets[unit]) : int(self.offsets[unit + 1])].long()

    def spelt_out(self) -> Candidates:
        """The same with a list for every unit."""
        if self.full is None:
            return self
        parts = [self.listed(unit) for unit in range(self.units)]
        offsets, indices = offsets_of_lists(parts, self.offsets.device), torch.cat(parts).to(torch.int32)
        return replace(self, offsets=offsets, indices=indices, full=None, hidden=(0, 0))

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        first, last = self.forced
        mask = torch.zeros(1, self.shape.k_len, dtype=torch.bool, device=self.offsets.device)
        mask[:, self.listed(unit)] = True
        mask[:, :first] = mask[:, last:] = True
        return mask[: stop - start]

    def check(self) -> None:
        if self.shape.q_len != 1:
            raise SaccadeError(f"candidates serve one query row, got q_len={self.shape.q_len}")
        check_csr(self.offsets, self.indices, self.shape.heads, 1)
        if self.offsets.numel() != self.k.numel() + 1:
            raise SaccadeError(f"{self.k.numel()} budgets do not fit {self.offsets.numel() - 1} lists of candidates")
        first, last = self.forced
        check_below(self.offsets, self.indices, self.offsets.new_full((self.units,), last), "candidate")
        if self.indices.numel() and int(self.indices.min()) < first:
            raise SaccadeError(f"the first {first} keys are forced and must not be candidates")


def split_forced(selection: Candidates) -> tuple[Tokens, Candidates]:
    """``selection`` in two: its forced keys, for the near part, and its candidates without them, for the far one. An
    idle head has its few keys among the former and nothing among the latter. The ``rest`` is in neither.

    Raises SaccadeError where several heads choose together: they rank by weights, of which the forced keys have their
    part, so that the far part alone cannot choose.
    """
    shape, (first, last) = selection.shape, selection.forced
    if selection.units != shape.heads:
        raise SaccadeError(
            f"candidates of {selection.units} units for {shape.heads} query heads cannot be split: heads that choose "
            f"together rank by weights over forced keys too; use unit='q_head'"
        )
    device = selection.k.device
    ends = torch.cat([torch.arange(first, device=device), torch.arange(last, shape.k_len, device=device)])
    sizes = torch.full((shape.heads,), ends.numel(), dtype=torch.int64, device=device)
    keys = ends.to(torch.int32).expand(shape.heads, -1)
    listed = torch.ones(keys.shape, dtype=torch.bool, device=device)
    if selection.idle is not None:
        few = ends < min(selection.idle_keys, shape.k_len)
        listed = torch.where(selection.idle[:, None], few, listed)
        sizes = listed.sum(1)
    near = Tokens(shape, torch.nn.functional.pad(sizes.cumsum(0), (1, 0)), keys[listed])
    spelt = selection.spelt_out()  # a full unit's candidates are those between the forced keys
    far = replace(spelt, sinks=0, local=0, idle_keys=0, rest=None)
    return near, far
