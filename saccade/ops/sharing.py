"""Keys that one query retrieved, shared with later ones that resemble it (CIS; algorithms.md 5.2, 5.3).

The functions here are the meaning; the C++ kernels do the same where they can.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.ops import cpu, triton
from saccade.selection import Tokens
from saccade.selection.csr import offsets_of

_NONE = torch.iinfo(torch.int32).max  # behind every position
_KERNEL_TYPES = (torch.float32, torch.bfloat16)


@dataclass
class Anchors:
    """The queries of one block of steps that retrieved, ``count`` of them, oldest first, and what they share.

    ``directions`` fp32 [room, units, channels], of length 1; ``has`` bool [room, units]: which units retrieved;
    ``counts`` int32 [room, units]; ``keys`` int32 [room, units, capacity], rising, of which the first ``counts`` are
    shared; ``positions`` int64 [room]: where the queries stand, the first of them at ``first``. ``moving`` int32 [room,
    units, most], rising: the best of the keys each retrieved, the rest behind every position; ``most`` is 0 where none
    are to move along with the steps. The place behind the last anchor holds the query at hand.
    """

    directions: Tensor
    has: Tensor
    counts: Tensor
    keys: Tensor
    positions: Tensor
    moving: Tensor
    count: int = 0
    first: int = 0

    @classmethod
    def empty(cls, units: int, channels: int, capacity: int = 0, most: int = 0) -> Anchors:
        """Room for one; lists hold at most ``capacity`` keys, and ``most`` keys are remembered as the best."""
        return cls(
            torch.zeros(1, units, channels),
            torch.zeros(1, units, dtype=torch.bool),
            torch.zeros(1, units, dtype=torch.int32),
            torch.zeros(1, units, capacity, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
            torch.full((1, units, most), _NONE, dtype=torch.int32),
        )

    @property
    def units(self) -> int:
        return self.has.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def most(self) -> int:
        return self.moving.shape[2]

    def widen(self, capacity: int, most: int) -> None:
        """Make room for lists of ``capacity`` keys and ``most`` best ones, where there is less."""
        pad = torch.nn.functional.pad
        self.keys = pad(self.keys, (0, max(0, capacity - self.capacity)))
        self.moving = pad(self.moving, (0, max(0, most - self.most)), value=_NONE)

    def reserve(self) -> None:
        """Make room behind the last anchor."""
        if self.count < len(self.positions):
            return
        for name in ("directions", "has", "counts", "keys", "positions", "moving"):
            part = getattr(self, name)
            setattr(self, name, torch.cat([part, torch.zeros_like(part)]))


def share(
    anchors: Anchors,
    q: Tensor,
    tau: float,
    local: int,
    length: int,
    cover_gap: bool = True,
    moves: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor, Tensor]:
    """What every unit reads of the most recent anchor whose cosine with it exceeds ``tau``, as lists: (offsets int64
    [units + 1], keys int32, bool [units]: who finds none and has an empty list).

    ``q`` [heads, head_dim] of the step that sees ``length`` keys; a unit's channels are those of its heads, one after
    the other. Shared keys are joined by those that have left the window of ``local`` keys since, if ``cover_gap``, and,
    if the anchor remembers its best, by those moved on by the steps since, with what is up to ``moves[0]`` away, from
    key ``moves[1]`` on.
    """
    anchors.reserve()
    direction = anchors.directions[anchors.count]
    if _kernels_serve(anchors, q) and q.shape[1] % 16 == 0:
        return _share_in_kernel(anchors, q, tau, local, length, cover_gap, moves)
    if q.is_cuda and triton.available() and anchors.most == 0:
        return triton.share(anchors, q, tau, local, length, cover_gap)
    rows = q.float().reshape(direction.shape)
    direction.copy_(rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-38))
    whose = torch.full((anchors.units,), -1)
    for number in range(anchors.count):
        alike = anchors.has[number] & ((direction * anchors.directions[number]).sum(-1) > tau)
        whose = torch.where(alike, number, whose)
    searching, whose, unit = whose < 0, whose.clamp(min=0), torch.arange(anchors.units)
    keys = anchors.keys[whose, unit]
    listed = torch.arange(anchors.capacity) < anchors.counts[whose, unit][:, None]
    if cover_gap:
        left = anchors.positions[whose, None] + 1 - local
        gap = left + torch.arange(max(0, length - local - int(left.min())))
        keys = torch.cat([keys, gap.to(torch.int32)], 1)
        listed = torch.cat([listed, gap < length - local], 1)
    if anchors.most:
        keys, listed = _moved_in(anchors, whose, keys, listed, length, length - local, moves)
    listed &= ~searching[:, None]
    return offsets_of(listed.sum(1)), keys[listed], searching


def keep(
    anchors: Anchors,
    read: Tokens,
    weights: Tensor,
    searching: Tensor,
    position: int,
    middle: tuple[int, int],
    best: int,
    reach: int,
    threads: int | None = None,
) -> None:
    """Make the query at hand an anchor: ``searching`` bool [units] retrieved, at ``position``.

    They share what they ``read`` from ``middle[0]`` on and below ``middle[1]``, and the neighbours up to ``reach`` away
    of the ``best`` of those keys, by their mean weight over the unit's heads, ties to the lower. ``weights`` as
    :func:`saccade.ops.weights.selected_weights` lays them out.
    """
    at = anchors.count
    anchors.reserve()
    anchors.has[at], anchors.positions[at] = searching, position
    anchors.first = position if at == 0 else anchors.first
    anchors.count += 1
    if weights.is_cuda and triton.available() and anchors.most == 0:
        triton.keep(anchors, at, read, weights, middle, best, reach)
        return
    if _kernels_serve(anchors, weights):
        weights = weights if weights.stride(-1) == 1 else weights.contiguous()
        cpu._kernels.keep_keys(
            torch.get_num_threads() if threads is None else threads,
            anchors.units,
            anchors.capacity,
            anchors.has[at].data_ptr(),
            read.offsets.data_ptr(),
            read.indices.data_ptr(),
            weights.data_ptr(),
            weights.stride(0),
            weights.shape[0],
            *middle,
            best,
            reach,
            anchors.most,
            anchors.counts[at].data_ptr(),
            anchors.keys[at].data_ptr(),
            anchors.moving[at].data_ptr(),
        )
        return
    merged, heavy = _spread(read, weights.mean(0), searching, middle, best, reach)
    most = min(anchors.most, heavy.shape[1])
    anchors.moving[at] = _NONE
    anchors.moving[at, :, :most] = heavy[:, :most]
    anchors.counts[at] = (merged != _NONE).sum(1).to(torch.int32)
    anchors.keys[at, :, : merged.shape[1]] = merged


def leave_out(anchors: Anchors, hidden: tuple[int, int]) -> None:
    """Take the keys from ``hidden[0]`` on and below ``hidden[1]`` out of what the latest anchor shares: neighbours that
    a window hides would be cut off again at every step."""
    keys, counts = anchors.keys[anchors.count - 1], anchors.counts[anchors.count - 1]
    listed = torch.arange(anchors.capacity) < counts[:, None]
    kept = listed & ((keys < hidden[0]) | (keys >= hidden[1]))
    keys.copy_(keys.masked_fill(~kept, _NONE).sort(1).values)
    counts.copy_(kept.sum(1))


def _share_in_kernel(
    anchors: Anchors, q: Tensor, tau: float, local: int, length: int, cover_gap: bool, moves: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    units, count, follow = anchors.units, anchors.count, min(moves[0], length)
    q = q if q.stride(-1) == 1 else q.contiguous()
    gap = length - 1 - int(anchors.positions[0]) if count else 0
    offsets, searching = torch.empty(units + 1, dtype=torch.int64), torch.empty(units, dtype=torch.bool)
    longest = min(length, anchors.capacity + gap + anchors.most * (2 * follow + 1))
    indices = torch.empty(units * longest if count else 0, dtype=torch.int32)
    cpu._kernels.share_keys(
        units,
        anchors.directions.shape[2],
        anchors.capacity,
        count,
        anchors.directions.data_ptr(),
        anchors.has.data_ptr(),
        anchors.counts.data_ptr(),
        anchors.keys.data_ptr(),
        anchors.positions.data_ptr(),
        q.data_ptr(),
        q.dtype == torch.bfloat16,
        q.stride(0),
        q.shape[1],
        tau,
        cover_gap,
        length - local,
        local,
        anchors.most,
        anchors.moving.data_ptr(),
        follow,
        moves[1],
        anchors.directions[count].data_ptr(),
        searching.data_ptr(),
        offsets.data_ptr(),
        indices.data_ptr(),
    )
    return offsets, indices[: int(offsets[-1])], searching


def _kernels_serve(anchors: Anchors, rows: Tensor) -> bool:
    return cpu.available() and rows.device.type == anchors.keys.device.type == "cpu" and rows.dtype in _KERNEL_TYPES


def _moved_in(
    anchors: Anchors, whose: Tensor, keys: Tensor, listed: Tensor, length: int, last: int, moves: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """``keys`` [units, m], of which ``listed`` count, with the best of anchors ``whose`` [units] moved on and what is
    up to ``moves[0]`` away of them, from ``moves[1]`` on and below ``last``: rising, each once."""
    moving = anchors.moving[whose, torch.arange(anchors.units)].long()
    steps = length - 1 - anchors.positions[whose]
    follow = min(moves[0], length)
    around = moving[..., None] + steps[:, None, None] + torch.arange(-follow, follow + 1)
    there = (moving != _NONE)[..., None] & (around >= moves[1]) & (around < last)
    moved = around.masked_fill(~there, _NONE).flatten(1).to(torch.int32)
    return _union(torch.cat([keys.masked_fill(~listed, _NONE), moved], 1))


def _union(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``keys`` sorted, and which entries are no ``_NONE`` and no repetition."""
    keys = keys.sort(1).values
    listed = keys != _NONE
    listed[:, 1:] &= keys.diff(dim=1) != 0
    return keys, listed


def _spread(
    read: Tokens, weights: Tensor, has: Tensor, middle: tuple[int, int], best: int, reach: int
) -> tuple[Tensor, Tensor]:
    """``keep``'s lists, int32 [units, most], and the best keys [units, best]: rising, padded with ``_NONE``."""
    counts = read.offsets.diff()
    places = read.offsets[:-1, None] + torch.arange(int(counts.max()))
    listed = (torch.arange(places.shape[1]) < counts[:, None]) & has[:, None]
    places = places.clamp(max=max(0, read.indices.numel() - 1))
    keys, weight = read.indices[places], weights[places]
    inside = listed & (keys >= middle[0]) & (keys < middle[1])
    order = torch.sort(weight.masked_fill(~inside, -1.0), dim=1, descending=True, stable=True).indices[:, :best]
    reach = min(reach, middle[1])  # further away is nothing
    around = torch.arange(-reach, reach + 1, dtype=torch.int32)
    heavy = keys.gather(1, order).masked_fill(~inside.gather(1, order), _NONE).sort(1).values
    near = (keys.gather(1, order)[..., None] + around).flatten(1)
    near = near.masked_fill(~inside.gather(1, order).repeat_interleave(around.numel(), 1), _NONE)
    near = near.masked_fill((near < middle[0]) | (near >= middle[1]), _NONE)
    merged = torch.cat([keys.masked_fill(~inside, _NONE), near], 1).sort(1).values
    merged[:, 1:][merged.diff(dim=1) == 0] = _NONE
    merged = merged.sort(1).values
    return merged[:, : int((merged != _NONE).sum(1).max())], heavy
