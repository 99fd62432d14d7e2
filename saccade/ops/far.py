"""Decode over keys of which some lie in host memory: those are attended there by the CPU, the others on the device, and
both are merged by log-sum-exp. What is fetched instead, kv/compute.py says.

A method's candidates (LFPS as its paper runs it) are scored, chosen and attended on the CPU, all but the forced keys,
which are attended on the device; only the query goes down, and a result and its log-sum-exp come up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from saccade.kv.host import HostTier
from saccade.kv.tiered import Array, TieredView
from saccade.ops.backends import CPU, REFERENCE
from saccade.ops.call import Call, Result
from saccade.ops.down import Down
from saccade.ops.merge import merge_state
from saccade.ops.weights import selected_weights
from saccade.selection import Band, Blocks, Candidates, Dense, Selection, Tokens
from saccade.selection.candidates import split_forced
from saccade.selection.pieces import apart, read_blocks, read_blocks_by_head

Runs = Callable[[Call], Result]


def run(call: Call, view: TieredView, attend: Runs) -> tuple[Result, bool] | None:
    """``call``, over ``view``, as tiered.run has it; None where all that it reads is to be brought in."""
    selection, tier = call.selection, view.tiers.tier
    if not isinstance(tier, HostTier) or tier.compute.mode == "device" or call.q.shape[1] != 1:
        return None
    split = _candidates(call, view, tier) if isinstance(selection, Candidates) else _listed(call, view, tier)
    if split is None:
        return None
    lists, missing = view.ids_of(split.near), 0
    near_heads = None if split.heads is None else [own[np.isin(own, split.near)] for own in split.heads]
    before = view.tiers.counts.misses
    began = _now(call.q) if tier.compute.measures() else None
    query = Down(call.q)
    with view.hold(split.near, heads=near_heads):
        missing = view.tiers.counts.misses - before
        tier.compute.fetched(view.layer, lists, missing, None if began is None else _now(call.q) - began)
        cells = view.places()[1]  # what had to leave for what came may have taken copies with it
        if len(split.far) and view.strangers(split.far, split.want, cells):
            return None  # who fetches them sees whether they are lost
        near = replace(call, kv=view.held(split.near, near_heads), selection=split.there[0], want_weights=False)
        here = attend(near) if len(split.near) else _nothing(near)
        if not len(split.far):
            return here._replace(used=selection), False
        there, far = _attend_far(call, view, tier, split, cells, query)
        device = call.q.device
        out, lse = merge_state(here.out, here.lse, there.out.to(device), there.lse.to(device))
        used, order = _joined(selection, split, there)
        weights = None
        if call.want_weights:
            weigh = partial(selected_weights, scale=call.scale, softcap=call.softcap)
            ours = weigh(call.q, near.kv, split.there[0], lse)
            theirs = weigh(far.q, far.kv, there.used, lse.cpu()).to(device)
            weights = ours + theirs if order is None else torch.cat([ours, theirs], 1)[:, order.to(device)]
    backend = f"{here.backend}+{there.backend}" if len(split.near) else there.backend
    return Result(out.to(call.q.dtype), lse, used, backend, weights), False


@dataclass(frozen=True)
class _Split:
    """Blocks of a view, rising: those that are attended on the device, and those where they lie, of which ``want``
    (bool [KV heads or 1, blocks]) says who reads them. ``there``: the selection's part of each. ``heads``: the blocks
    that each KV head reads, where they lie apart."""

    near: Array
    far: Array
    want: Array
    there: tuple[Selection, Selection]
    heads: list[Array] | None

    @property
    def parts(self) -> int:
        """That are attended where they lie."""
        return int(self.want[:, self.far].sum())


def _listed(call: Call, view: TieredView, tier: HostTier) -> _Split | None:
    """Blocks that are absent are far, those of them that are not to be fetched."""
    selection, size = call.selection, view.block_size
    if type(selection) not in (Blocks, Tokens, Dense, Band) or (call.want_weights and type(selection) is Band):
        return None
    mask = read_blocks(selection.to(view.device), size).cpu().numpy()
    by_head = read_blocks_by_head(selection.to(view.device), size) if view.apart else None
    resident, cells = view.places()
    want = np.broadcast_to(mask, resident.shape) if by_head is None else by_head.cpu().numpy()
    grid = max(1, selection.block_size // size) if isinstance(selection, Blocks) else 1  # what one list entry reads
    gone = _grown(np.any(want & ~resident, axis=0), grid)
    near = np.nonzero(mask)[0]
    if not gone.any():
        return None
    bare = np.nonzero(gone & mask & np.any(want & resident & (cells == 0), axis=0))[0]
    if len(bare) and view.copied(bare):  # neighbours on the device, which one list entry reads with what is absent
        resident, cells = view.places()
    fits = len(near) <= view.piece_blocks
    asked = np.nonzero(gone & mask)[0]
    rents = np.zeros(len(mask), dtype=bool)
    rents[asked] = tier.compute.rents(view.layer, view.ids_of(asked), fits)
    whole = ~_grown(np.any(want & (cells == 0), axis=0), grid)
    far = _grown(rents & gone, grid) & whole & mask
    near, chosen = np.nonzero(mask & ~far)[0], np.nonzero(far)[0]
    if len(near) > view.piece_blocks or (not len(chosen) and tier.compute.mode == "host"):
        return None
    parts = apart(selection, torch.from_numpy(far), size)
    heads = None if by_head is None else [np.nonzero(own)[0] for own in want]
    return _Split(near, chosen, want, parts, heads)


def _candidates(call: Call, view: TieredView, tier: HostTier) -> _Split | None:
    """Forced keys are near, and all candidates far: which of them are read is not known before they are scored."""
    selection, size = call.selection, view.block_size
    assert isinstance(selection, Candidates)
    if tier.compute.mode != "host" or selection.units != selection.shape.heads:
        return None
    forced, others = split_forced(replace(selection, rest=None))
    near = np.nonzero(read_blocks(forced.to(view.device), size).cpu().numpy())[0]
    mask = read_blocks(others.to(view.device), size).cpu().numpy()
    far = np.nonzero(mask)[0]
    if not len(far) or len(near) > view.piece_blocks or not view.copied(far):
        return None
    want = np.broadcast_to(mask, (len(view.tiers.each), len(mask)))
    return _Split(near, far, want, (forced, others), None)


def _attend_far(
    call: Call, view: TieredView, tier: HostTier, split: _Split, cells: Array, query: Down
) -> tuple[Result, Call]:
    q = query.wait()
    there_view = view.there(split.far, cells)
    began = time.perf_counter()
    selection = split.there[1].to(torch.device("cpu"))
    far = Call(q, there_view, selection, call.scale, call.softcap, call.threads)
    backend = CPU if CPU.serves(far) is None else REFERENCE
    there = backend.kernel(far)(far)
    tier.compute.attended(view.layer, view.ids_of(split.far), split.parts, time.perf_counter() - began)
    tier.counts.attended_on_host += split.parts
    tier.counts.bytes_down += q.nbytes
    tier.counts.bytes_up += there.out.nbytes + there.lse.nbytes
    return there, far


def _joined(selection: Selection, split: _Split, there: Result) -> tuple[Selection, Tensor | None]:
    """What was read, and for lists of keys where each entry's weight is: of the near part, then of the far one."""
    near = split.there[0]
    if not isinstance(selection, Candidates | Tokens) or not isinstance(near, Tokens):
        return selection, None
    k_len, device = selection.shape.k_len, near.offsets.device
    far = there.used.to(device)
    assert isinstance(far, Tokens)
    keyed = [one.indices[: int(one.offsets[-1])].long() + k_len * _lists(one) for one in (near, far)]
    rising, order = torch.cat(keyed).sort()
    offsets = near.offsets + far.offsets
    return Tokens(selection.shape, offsets, (rising % k_len).to(torch.int32)), order


def _lists(tokens: Tokens) -> Tensor:
    counts = tokens.offsets.diff()
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


def _nothing(call: Call) -> Result:
    lse = torch.full(call.q.shape[:2], -torch.inf, device=call.q.device)
    return Result(torch.zeros_like(call.q), lse, call.selection, "")


def _grown(mask: Array, grid: int) -> Array:
    """Whole cells of ``grid`` entries, where any of their own is marked."""
    if grid == 1:
        return mask
    padded = np.pad(mask, (0, -len(mask) % grid)).reshape(-1, grid)
    return np.repeat(padded.any(1), grid)[: len(mask)]


def _now(q: Tensor) -> float:
    """The time when the device has done what it was asked to."""
    if q.is_cuda:
        torch.cuda.synchronize(q.device)
    return time.perf_counter()
