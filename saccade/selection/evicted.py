"""What is left of a selection once keys have been evicted for good."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.selection.base import Selection
from saccade.selection.candidates import Candidates
from saccade.selection.corrected import Corrected
from saccade.selection.csr import offsets_of_lists
from saccade.selection.narrowed import Narrowed, plain


@dataclass(frozen=True, eq=False)
class Without(Narrowed):
    """What ``inner`` selects but for the keys ``gone``, bool [units, m]: positions from m on are all there."""

    gone: Tensor

    @property
    def units(self) -> int:
        return math.lcm(self.inner.units, self.gone.shape[0])

    def allowed(self, unit: int, start: int, stop: int) -> Tensor:
        gone = self.gone[unit * self.gone.shape[0] // self.units]
        return ~torch.nn.functional.pad(gone, (0, self.shape.k_len - gone.numel()))[None]


def without(selection: Selection, gone: Tensor) -> Selection:
    """``selection`` without the keys ``gone``, bool [units, m] with m <= k_len; for one row as token lists, which know
    what they read. The row's own key must not be gone."""
    if not bool(gone.any()):
        return selection
    if isinstance(selection, Candidates):
        return _without_candidates(selection, gone_for(gone, selection.units))
    if isinstance(selection, Corrected):
        return replace(selection, inner=without(selection.inner, gone), gone=gone)
    return plain(Without(selection, gone))


def _without_candidates(candidates: Candidates, gone: Tensor) -> Candidates:
    """Fewer candidates; where forced keys are gone, the others of them become candidates, and ``k`` counts them."""
    shape, (first, last) = candidates.shape, candidates.forced
    hidden = torch.nn.functional.pad(gone, (0, shape.k_len - gone.shape[1]))
    device = candidates.offsets.device
    forced = torch.cat([torch.arange(first, device=device), torch.arange(last, shape.k_len, device=device)])
    kept = not bool(hidden[:, forced].any())
    parts = [
        candidates.listed(u) if kept else torch.cat([candidates.listed(u), forced]) for u in range(candidates.units)
    ]
    parts = [part[~hidden[u, part]].sort().values for u, part in enumerate(parts)]
    return replace(
        candidates,
        offsets=offsets_of_lists(parts, device),
        indices=torch.cat(parts).to(torch.int32),
        k=candidates.k if kept else candidates.k + forced.numel() - hidden[:, forced].sum(1),
        sinks=candidates.sinks if kept else 0,
        local=candidates.local if kept else 0,
        full=None,
        hidden=(0, 0),
        idle_keys=candidates.idle_keys if kept else 0,
        idle=candidates.idle if kept else None,
        rest=candidates.rest if kept else None,
    )


def gone_for(gone: Tensor, units: int) -> Tensor:
    """``gone`` bool [units, m] with one row per unit of another granularity: what is gone for any head of a unit is
    gone for the unit."""
    if gone.shape[0] > units:
        return gone.unflatten(0, (units, -1)).any(1)
    return gone.repeat_interleave(units // gone.shape[0], 0)
