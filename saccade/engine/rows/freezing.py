"""Rows of a pass that skip layers: which they are, and the keys and values they leave there.

A policy's freeze skips deep layers of early rows. The last layer's output is of no use to most rows of a prefill: only
the prompt's last rows are looked at, by the head and by methods, so the others leave their keys and values and stop.

What is skipped depends on positions and on the length of the context when its prefill ends, never on chunks or on the
batch; so keys that were dropped come back the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.engine.steps.step import ScheduledRequest
from saccade.machine import sent
from saccade.models.interface import FrozenRows

READ_ROWS = 128  # last rows of a prefill that always run whole: what prefill methods look at to choose


def frozen_rows(
    batch: Sequence[ScheduledRequest], layers: int, all_read: Callable[[int], bool] = lambda _: False
) -> FrozenRows | None:
    """The rows of a packed batch that skip layers; None where there are none. ``all_read``: whether an observer looks
    at the attention of every row of a request, given by its id, so that only what a policy freezes is skipped."""
    if all(rows.phase != "prefill" for rows in batch):
        return None
    first, projected = [], []
    for rows in batch:
        positions = torch.arange(rows.start, rows.stop)
        frozen_from = _first_frozen(rows, positions, layers)
        if not all_read(rows.request_id) and _leaves_unread(rows):
            unread = positions < rows.span_stop - _read_rows(rows)
            frozen_from = torch.where(unread, frozen_from.clamp(max=layers - 1), frozen_from)
        first.append(frozen_from)
        projected.append(torch.full((rows.length,), rows.policy.freeze is None or not rows.policy.freeze.copies))
    frozen = FrozenRows(torch.cat(first), torch.cat(projected))
    return frozen if bool((frozen.first < layers).any()) else None


def _leaves_unread(rows: ScheduledRequest) -> bool:
    """Whether the last layer of a prefill may skip rows whose output is not read."""
    freeze = rows.policy.freeze
    return (
        rows.phase == "prefill"
        and not rows.policy.decode.watches
        and (freeze is None or not freeze.copies)
        and not rows.scored
    )


def _read_rows(rows: ScheduledRequest) -> int:
    return max(READ_ROWS, rows.policy.decode.tail_rows)


def is_frozen(rows: ScheduledRequest, position: int, layer: int, layers: int) -> bool:
    """Whether the row at ``position`` of the prefill that ``rows`` belong to skips ``layer``, or lies before all that
    are read there."""
    if layer == layers - 1 and position < rows.span_stop - _read_rows(rows):
        return True
    if rows.policy.freeze is None:  # asked for in every layer, where a device's answer would have to be waited for
        return False
    return bool(frozen_at(rows, torch.tensor([position], device="cpu"), layer, layers))


def frozen_at(rows: ScheduledRequest, positions: Tensor, layer: int, layers: int) -> Tensor:
    """Which rows at ``positions`` int64 [n] of a prefill its policy freezes at ``layer``: bool [n]."""
    return _first_frozen(rows, positions, layers) <= layer


def _first_frozen(rows: ScheduledRequest, positions: Tensor, layers: int) -> Tensor:
    freeze = rows.policy.freeze
    if freeze is None or rows.phase != "prefill":
        return positions.new_full(positions.shape, layers)
    return freeze.first_frozen(positions, rows.span_length, layers)


def runs(live: Tensor) -> list[tuple[int, int]]:
    """Stretches ``start .. stop - 1`` of True in bool [rows]."""
    edges = torch.cat([live[:1], live[1:] != live[:-1], live[-1:]]).nonzero()[:, 0].tolist()
    return list(zip(edges[::2], edges[1::2]))


def interleaved(skipped: Tensor, frozen: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all rows in order, from those of the ``skipped`` (bool [rows], on the host) and of the other
    ones: each [kv_heads, n, head_dim]."""
    whole = (k.new_empty(k.shape[0], skipped.numel(), k.shape[2]), v.new_empty(v.shape[0], skipped.numel(), v.shape[2]))
    places = [sent(rows.nonzero()[:, 0], k.device) for rows in (skipped, ~skipped)]
    for part, *own in zip(whole, frozen, (k, v)):
        for at, rows in zip(places, own):
            part.index_copy_(1, at, rows)
    return whole
