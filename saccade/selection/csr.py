"""Flat ragged lists: list ``j`` is ``indices[offsets[j] : offsets[j + 1]]``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from saccade.errors import SaccadeError


def offsets_of(counts: Tensor) -> Tensor:
    """int64 offsets [lists + 1] from list lengths."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def offsets_of_lists(lists: Sequence[Tensor], device: torch.device) -> Tensor:
    """int64 offsets [lists + 1] of ``lists``, on ``device``."""
    return torch.tensor([0, *accumulate(part.numel() for part in lists)], device=device)


def list_ids(offsets: Tensor) -> Tensor:
    """For every entry of a CSR structure the number of the list it belongs to."""
    return torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=offsets.device), offsets.diff())


def check_csr(offsets: Tensor, indices: Tensor, most_lists: int, lists_per_unit: int) -> None:
    """Raise SaccadeError unless the lists are sorted, unique and divide those of all query heads."""
    lists = offsets.numel() - 1
    if lists < 1 or lists % lists_per_unit or most_lists % lists:
        raise SaccadeError(f"{lists} index lists do not divide the {most_lists} lists of all query heads")
    if int(offsets[0]) != 0 or int(offsets[-1]) != indices.numel() or bool((offsets.diff() < 0).any()):
        raise SaccadeError("offsets must rise from 0 to the number of indices")
    rises = torch.ones(indices.numel() + 1, dtype=torch.bool, device=indices.device)
    rises[1:-1] = indices[1:] > indices[:-1]
    rises[offsets] = True  # where a list begins, whatever the one before it ended with
    if not bool(rises.all()):
        raise SaccadeError("indices must be sorted and unique within each list")


def check_below(offsets: Tensor, indices: Tensor, limit: Tensor, what: str) -> None:
    """Every index of list ``j`` must lie in ``[0, limit[j])``."""
    bad = (indices < 0) | (indices.long() >= limit[list_ids(offsets)])
    if bool(bad.any()):
        raise SaccadeError(f"{what} index {int(indices[bad][0])} lies outside the causal range of its rows")
