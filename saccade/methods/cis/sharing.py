"""Keys that one query retrieved, shared with later ones that resemble it (CIS; docs/algorithms.md 5.2, 5.3).

The functions here are the meaning. On a CPU the kernels of csrc/sharing.cpp do the same, here and within a step of
many rows (host.py), where no query passes keys on and nothing is left out (recorded.reference_alone).
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.methods.cis.anchors import NONE, Anchors
from saccade.ops import cpu
from saccade.ops.cpu_structs import STORAGE, address, native
from saccade.ops.layout import flat, rows
from saccade.selection import Tokens
from saccade.selection.csr import offsets_of


def share(
    anchors: Anchors,
    q: Tensor,
    tau: float,
    local: int,
    length: int,
    cover_gap: bool = True,
    moves: tuple[int, int] = (0, 0),
    passes_on: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What every unit reads of the most recent anchor whose cosine with it exceeds ``tau``, as lists: (offsets int64
    [units + 1], keys int32, bool [units]: who finds none and has an empty list).

    ``q`` [heads, head_dim] of the step that sees ``length`` keys; a unit's channels are those of its heads, one after
    the other. Shared keys are joined by those that have left the window of ``local`` keys since, if ``cover_gap``, and,
    if the anchor remembers its best, by those moved on by the steps since, with what is up to ``moves[0]`` away, from
    key ``moves[1]`` on. All of this counts from the query that retrieved, whichever query has passed its keys on since.
    If the step itself ``passes_on`` what it shares, that is noted behind the last anchor, for :func:`keep` or
    :func:`pass_on`.
    """
    anchors.reserve()
    direction = anchors.directions[anchors.count]
    plain = cover_gap and not passes_on and q.shape[1] % 16 == 0
    if plain and _why_not(anchors, q) is None and not anchors.passes_on():
        return _share_in_kernel(anchors, q, tau, local, length, moves)
    asked = q.float().reshape(direction.shape)
    direction.copy_(asked / asked.norm(dim=-1, keepdim=True).clamp(min=1e-38))
    device = direction.device
    alike = anchors.has[: anchors.count] & ((direction * anchors.directions[: anchors.count]).sum(-1) > tau)
    numbers = torch.arange(1, anchors.count + 1, device=device)[:, None]
    whose = torch.cat([numbers.new_zeros(1, anchors.units), alike * numbers]).amax(0) - 1
    searching, unit = whose < 0, torch.arange(anchors.units, device=device)
    whose = anchors.retrieving(whose.clamp(min=0))
    if passes_on:
        anchors.counts[anchors.count] = (-1 - whose).masked_fill(searching, 0)
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
    passes_on: bool = False,
) -> None:
    """Make the query at hand an anchor: ``searching`` bool [units] retrieved, at ``position``. The others are none,
    unless it ``passes_on`` what :func:`share` noted that they have.

    They share what they ``read`` from ``middle[0]`` on and below ``middle[1]``, and the neighbours up to ``reach`` away
    of the ``best`` of those keys, by their mean weight over the unit's heads, ties to the lower. ``weights`` as
    :func:`saccade.ops.weights.selected_weights` lays them out.
    """
    at = anchors.count
    anchors.reserve()
    noted = anchors.counts[at].clone()
    _keep_lists(anchors, read, weights, searching, middle, best, reach, threads)
    if passes_on:
        anchors.counts[at] = torch.where(searching, anchors.counts[at], noted)
    anchors.has[at] = True if passes_on else searching
    anchors.add(position)


def pass_on(anchors: Anchors, position: int) -> None:
    """Make the query at hand, at ``position``, an anchor of which no unit retrieved: each passes on what :func:`share`
    noted that it has."""
    anchors.has[anchors.count] = True
    anchors.add(position)


def _keep_lists(
    anchors: Anchors,
    read: Tokens,
    weights: Tensor,
    searching: Tensor,
    middle: tuple[int, int],
    best: int,
    reach: int,
    threads: int | None,
) -> None:
    """See ``keep``: write the lists behind the last anchor."""
    at = anchors.count
    if _why_not(anchors, weights) is None:
        anchors.check()
        weights, searching = rows(weights), flat(searching, torch.bool)
        offsets, indices = flat(read.offsets, torch.int64), flat(read.indices, torch.int32)
        low, high = middle
        native.keep_keys(
            native.KeepKeys(
                threads=torch.get_num_threads() if threads is None else threads,
                units=anchors.units,
                capacity=anchors.capacity,
                has=searching.data_ptr(),
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
    anchors.moving[at] = NONE
    anchors.moving[at, :, :most] = heavy[:, :most]
    anchors.counts[at] = (merged != NONE).sum(1).to(torch.int32)
    anchors.keys[at, :, : merged.shape[1]] = merged


def leave_out(anchors: Anchors, hidden: tuple[int, int]) -> None:
    """Take the keys from ``hidden[0]`` on and below ``hidden[1]`` out of what the latest anchor shares: neighbours that
    a window hides would be cut off again at every step."""
    keys, counts = anchors.keys[anchors.count - 1], anchors.counts[anchors.count - 1]
    listed = torch.arange(anchors.capacity, device=counts.device) < counts[:, None]
    kept = listed & ((keys < hidden[0]) | (keys >= hidden[1]))
    keys.copy_(keys.masked_fill(~kept, NONE).sort(1).values)
    counts.copy_(torch.where(counts < 0, counts, kept.sum(1)))


def _share_in_kernel(
    anchors: Anchors, q: Tensor, tau: float, local: int, length: int, moves: tuple[int, int]
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


def _why_not(anchors: Anchors, given: Tensor) -> str | None:
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
    there = (moving != NONE)[..., None] & (around >= moves[1]) & (around < last)
    moved = around.masked_fill(~there, NONE).flatten(1).to(torch.int32)
    return _union(torch.cat([keys.masked_fill(~listed, NONE), moved], 1))


def _union(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``keys`` sorted, and which entries are no ``NONE`` and no repetition."""
    keys = keys.sort(1).values
    listed = keys != NONE
    listed[:, 1:] &= keys.diff(dim=1) != 0
    return keys, listed


def _spread(
    read: Tokens, weights: Tensor, has: Tensor, middle: tuple[int, int], best: int, reach: int
) -> tuple[Tensor, Tensor]:
    """``keep``'s lists, int32 [units, most], and the best keys [units, best]: rising, padded with ``NONE``."""
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
    heavy = keys.gather(1, order).masked_fill(~inside.gather(1, order), NONE).sort(1).values
    near = (keys.gather(1, order)[..., None] + around).flatten(1)
    near = near.masked_fill(~inside.gather(1, order).repeat_interleave(around.numel(), 1), NONE)
    near = near.masked_fill((near < middle[0]) | (near >= middle[1]), NONE)
    merged = torch.cat([keys.masked_fill(~inside, NONE), near], 1).sort(1).values
    merged[:, 1:][merged.diff(dim=1) == 0] = NONE
    merged = merged.sort(1).values
    return merged[:, : int((merged != NONE).sum(1).max())], heavy
