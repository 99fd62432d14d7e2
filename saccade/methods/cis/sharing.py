"""Keys that one query retrieved, shared with later ones that resemble it (CIS; docs/algorithms.md 5.2, 5.3).

The functions here are the meaning; the C++ kernels do the same where they can.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.state import MethodState
from saccade.ops import cpu, triton
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.layout import flat, rows
from saccade.selection import Tokens
from saccade.selection.csr import offsets_of

CPU = torch.device("cpu")
_NONE = torch.iinfo(torch.int32).max  # behind every position


@dataclass
class Anchors(MethodState):
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

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        directions = fitting.tensor("directions", self.directions, torch.float32, None, sizes.units, None)
        room, units, channels = directions.shape
        fitting.require(channels > 0, "has directions of no channels")  # how many is the method's: see of()
        fitting.tensor("has", self.has, torch.bool, room, units)
        keys = fitting.tensor("keys", self.keys, torch.int32, room, units, None)
        counts = fitting.tensor("counts", self.counts, torch.int32, room, units)
        fitting.within("counts", counts, 0, keys.shape[2])
        shared = torch.arange(keys.shape[2], device=keys.device) < counts[..., None]
        fitting.within("keys", keys[shared], 0, sizes.length - 1)
        positions = fitting.tensor("positions", self.positions, torch.int64, room)
        fitting.within("positions", positions, 0, sizes.length)
        fitting.within("moving", fitting.tensor("moving", self.moving, torch.int32, room, units, None), 0, 2**31 - 1)
        fitting.within("count", self.count, 0, room)
        fitting.within("first", self.first, 0, sizes.length)

    @classmethod
    def empty(cls, units: int, channels: int, capacity: int = 0, most: int = 0, device: torch.device = CPU) -> Anchors:
        """Room for one, on ``device``; lists hold at most ``capacity`` keys, and ``most`` keys are remembered as the
        best."""
        return cls(
            torch.zeros(1, units, channels, device=device),
            torch.zeros(1, units, dtype=torch.bool, device=device),
            torch.zeros(1, units, dtype=torch.int32, device=device),
            torch.zeros(1, units, capacity, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.full((1, units, most), _NONE, dtype=torch.int32, device=device),
        )

    def of(self, units: int, channels: int) -> bool:
        """Whether it holds directions of so many units and channels: a saved one may be of another method's options."""
        return self.directions.shape[1:] == (units, channels)

    @property
    def units(self) -> int:
        return self.has.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def most(self) -> int:
        return self.moving.shape[2]

    def check(self) -> None:
        """SaccadeError unless the parts are contiguous, as kernels take them to be."""
        parts = (self.directions, self.has, self.counts, self.keys, self.positions, self.moving)
        if not all(map(Tensor.is_contiguous, parts)):
            raise SaccadeError("anchors are written in place and must be contiguous: clone a slice of them first")

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
    if q.shape[1] % 16 == 0 and _serves(anchors, q) is None:
        return _share_in_kernel(anchors, q, tau, local, length, cover_gap, moves)
    if q.is_cuda and triton.available():
        from saccade.methods.cis import triton_sharing

        return triton_sharing.share(anchors, q, tau, local, length, cover_gap, moves)
    asked = q.float().reshape(direction.shape)
    direction.copy_(asked / asked.norm(dim=-1, keepdim=True).clamp(min=1e-38))
    device = direction.device
    whose = torch.full((anchors.units,), -1, device=device)
    for number in range(anchors.count):
        alike = anchors.has[number] & ((direction * anchors.directions[number]).sum(-1) > tau)
        whose = torch.where(alike, number, whose)
    searching, whose, unit = whose < 0, whose.clamp(min=0), torch.arange(anchors.units, device=device)
    keys = anchors.keys[whose, unit]
    listed = torch.arange(anchors.capacity, device=device) < anchors.counts[whose, unit][:, None]
    if cover_gap:
        left = anchors.positions[whose, None] + 1 - local
        gap = left + torch.arange(max(0, length - local - int(left.min())), device=device)
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
    if weights.is_cuda and triton.available():
        from saccade.methods.cis import triton_sharing

        triton_sharing.keep(anchors, at, read, weights, middle, best, reach)
        return
    if _serves(anchors, weights) is None:
        anchors.check()
        weights = rows(weights)
        offsets, indices = flat(read.offsets, torch.int64), flat(read.indices, torch.int32)
        low, high = middle
        native.keep_keys(
            native.KeepKeys(
                threads=torch.get_num_threads() if threads is None else threads,
                units=anchors.units,
                capacity=anchors.capacity,
                has=address(anchors.has[at]),
                offsets=offsets.data_ptr(),
                indices=indices.data_ptr(),
                weights=weights.data_ptr(),
                weight_stride=weights.stride(0),
                rows=weights.shape[0],
                low=low,
                high=high,
                best=best,
                reach=reach,
                most=anchors.most,
                counts=address(anchors.counts[at]),
                keys=address(anchors.keys[at]),
                moving=address(anchors.moving[at]),
            )
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
    listed = torch.arange(anchors.capacity, device=counts.device) < counts[:, None]
    kept = listed & ((keys < hidden[0]) | (keys >= hidden[1]))
    keys.copy_(keys.masked_fill(~kept, _NONE).sort(1).values)
    counts.copy_(kept.sum(1))


def _share_in_kernel(
    anchors: Anchors, q: Tensor, tau: float, local: int, length: int, cover_gap: bool, moves: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    units, count, follow = anchors.units, anchors.count, min(moves[0], length)
    anchors.check()
    q = rows(q)
    gap = length - 1 - int(anchors.positions[0]) if count else 0
    offsets = torch.empty(units + 1, dtype=torch.int64, device="cpu")
    searching = torch.empty(units, dtype=torch.bool, device="cpu")
    longest = min(length, anchors.capacity + gap + anchors.most * (2 * follow + 1))
    indices = torch.empty(units * longest if count else 0, dtype=torch.int32, device="cpu")
    native.share_keys(
        native.ShareKeys(
            units=units,
            channels=anchors.directions.shape[2],
            capacity=anchors.capacity,
            anchors=count,
            directions=address(anchors.directions),
            has=address(anchors.has),
            counts=address(anchors.counts),
            keys=address(anchors.keys),
            positions=address(anchors.positions),
            q=q.data_ptr(),
            storage=STORAGE[q.dtype],
            head_stride=q.stride(0),
            head_dim=q.shape[1],
            tau=tau,
            cover_gap=cover_gap,
            last=length - local,
            local=local,
            most=anchors.most,
            best=address(anchors.moving),
            follow=follow,
            first=moves[1],
            direction=address(anchors.directions[count]),
            searching=searching.data_ptr(),
            offsets=offsets.data_ptr(),
            indices=indices.data_ptr(),
        )
    )
    return offsets, indices[: int(offsets[-1])], searching


def _serves(anchors: Anchors, given: Tensor) -> str | None:
    """Why the C++ kernels cannot work on ``anchors`` and ``given``; None where they can."""
    if not cpu.available():
        return cpu.why_unavailable()
    if not given.device.type == anchors.keys.device.type == "cpu":
        return f"queries lie on {given.device} and anchors on {anchors.keys.device}, not on the CPU"
    return None if given.dtype in STORAGE else f"its kernels read float32 or bfloat16; got {given.dtype}"


def _moved_in(
    anchors: Anchors, whose: Tensor, keys: Tensor, listed: Tensor, length: int, last: int, moves: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """``keys`` [units, m], of which ``listed`` count, with the best of anchors ``whose`` [units] moved on and what is
    up to ``moves[0]`` away of them, from ``moves[1]`` on and below ``last``: rising, each once."""
    moving = anchors.moving[whose, torch.arange(anchors.units, device=whose.device)].long()
    steps = length - 1 - anchors.positions[whose]
    follow = min(moves[0], length)
    around = moving[..., None] + steps[:, None, None] + torch.arange(-follow, follow + 1, device=whose.device)
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
    numbers = torch.arange(int(counts.max()), device=counts.device)
    places = read.offsets[:-1, None] + numbers
    listed = (numbers < counts[:, None]) & has[:, None]
    places = places.clamp(max=max(0, read.indices.numel() - 1))
    keys, weight = read.indices[places], weights[places]
    inside = listed & (keys >= middle[0]) & (keys < middle[1])
    order = torch.sort(weight.masked_fill(~inside, -1.0), dim=1, descending=True, stable=True).indices[:, :best]
    reach = min(reach, middle[1])  # further away is nothing
    around = torch.arange(-reach, reach + 1, dtype=torch.int32, device=keys.device)
    heavy = keys.gather(1, order).masked_fill(~inside.gather(1, order), _NONE).sort(1).values
    near = (keys.gather(1, order)[..., None] + around).flatten(1)
    near = near.masked_fill(~inside.gather(1, order).repeat_interleave(around.numel(), 1), _NONE)
    near = near.masked_fill((near < middle[0]) | (near >= middle[1]), _NONE)
    merged = torch.cat([keys.masked_fill(~inside, _NONE), near], 1).sort(1).values
    merged[:, 1:][merged.diff(dim=1) == 0] = _NONE
    merged = merged.sort(1).values
    return merged[:, : int((merged != _NONE).sum(1).max())], heavy
