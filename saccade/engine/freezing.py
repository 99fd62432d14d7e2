"""Rows of a pass that skip layers: which they are, and the keys and values they leave there.

A policy's freeze skips deep layers of early rows. The last layer's output is of no use to most rows of a prefill: only
the prompt's last rows are looked at, by the head and by methods, so the others leave their keys and values and stop.

What is skipped depends on positions and on the length of the context when its prefill ends, never on chunks or on the
batch; so keys that were dropped come back the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.request import Span, Work
from saccade.models.interface import FrozenRows

READ_ROWS = 128  # last rows of a prefill that always run whole: what prefill methods look at to choose


def frozen_rows(batch: list[Work], layers: int, all_read: bool = False) -> FrozenRows | None:
    """The rows of a packed batch that skip layers; None where there are none. ``all_read``: somebody looks at every
    row's attention, so only what a policy freezes is skipped."""
    if all(work.phase != "prefill" for work in batch):
        return None
    first, projected = [], []
    for work in batch:
        positions = torch.arange(work.start, work.stop)
        frozen_from = _first_frozen(work, positions, layers)
        if not all_read and _leaves_unread(work):
            unread = positions < _span(work).stop - _read_rows(work)
            frozen_from = torch.where(unread, frozen_from.clamp(max=layers - 1), frozen_from)
        first.append(frozen_from)
        projected.append(torch.full((work.length,), work.policy.freeze is None or not work.policy.freeze.copies))
    rows = FrozenRows(torch.cat(first), torch.cat(projected))
    return rows if bool((rows.first < layers).any()) else None


def _leaves_unread(work: Work) -> bool:
    """Whether the last layer of a prefill may skip rows that nobody reads."""
    freeze = work.policy.freeze
    return (
        work.phase == "prefill"
        and not work.policy.decode.watches
        and (freeze is None or not freeze.copies)
        and not work.request.to_score(work.start, work.stop)
    )


def _read_rows(work: Work) -> int:
    return max(READ_ROWS, work.policy.decode.tail_rows)


def is_frozen(work: Work, position: int, layer: int) -> bool:
    """Whether the row at ``position`` of the prefill that ``work`` belongs to skips ``layer``, or lies before all that
    are read there."""
    layers = work.request.sequence.kv.layers
    if layer == layers - 1 and position < _span(work).stop - _read_rows(work):
        return True
    if work.policy.freeze is None:  # asked for in every layer, where a device's answer would have to be waited for
        return False
    return bool(frozen_at(work, torch.tensor([position], device="cpu"), layer))


def frozen_at(work: Work, positions: Tensor, layer: int) -> Tensor:
    """Which rows at ``positions`` int64 [n] of a prefill its policy freezes at ``layer``: bool [n]."""
    return _first_frozen(work, positions, work.request.sequence.kv.layers) <= layer


def _first_frozen(work: Work, positions: Tensor, layers: int) -> Tensor:
    freeze = work.policy.freeze
    if freeze is None or work.phase != "prefill":
        return positions.new_full(positions.shape, layers)
    return freeze.first_frozen(positions, _span(work).length, layers)


def _span(work: Work) -> Span:
    return next(span for span in work.request.sequence.spans if span.start == work.span_start)


def runs(live: Tensor) -> list[tuple[int, int]]:
    """Stretches ``start .. stop - 1`` of True in bool [rows]."""
    edges = torch.cat([live[:1], live[1:] != live[:-1], live[-1:]]).nonzero()[:, 0].tolist()
    return list(zip(edges[::2], edges[1::2]))


def interleaved(skipped: Tensor, frozen: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all rows in order, from those of the ``skipped`` (bool [rows]) and of the other ones: each
    [kv_heads, n, head_dim]."""
    whole = (k.new_empty(k.shape[0], skipped.numel(), k.shape[2]), v.new_empty(v.shape[0], skipped.numel(), v.shape[2]))
    for part, of_frozen, of_live in zip(whole, frozen, (k, v)):
        part[:, skipped] = of_frozen
        part[:, ~skipped] = of_live
    return whole
