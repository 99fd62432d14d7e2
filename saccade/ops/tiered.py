"""Attention over keys some of which lie in a tier: what a selection reads is brought in, then the kernels run as ever.

Where that is more than memory holds, it comes in pieces: one is attended while the next one loads, and they are merged
by log-sum-exp. A ranking is read as far as its rule goes: its first blocks are brought in, and more where it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from saccade.kv.hold import Hold
from saccade.kv.tier import TierFull
from saccade.kv.tiered import TieredView
from saccade.ops import candidates, cpu_blocks, far, reference, triton
from saccade.ops.call import Call, Result
from saccade.ops.merge import merge_state
from saccade.ops.progressive import attend_ranking
from saccade.selection import Band, Blocks, Candidates, Dense, Ranking, Selection
from saccade.selection.pieces import Between, between, grid_of, read_blocks, read_blocks_by_head

FIRST_RANKED = 64  # blocks of a ranking that are brought in at first, for each unit
LEAST_RANKED = 16  # the same once it is known how far the step before went
Runs = Callable[[Call], Result]


def run(call: Call, view: TieredView, attend: Runs, named: str) -> tuple[Result, bool]:
    """``call``, over ``view``; ``attend`` runs calls over keys that are resident, on the backend ``named``. Whether the
    result is whole: else what ``attend`` does behind a kernel is still to be done."""
    selection = call.selection
    if (ran := far.run(call, view, attend)) is not None:
        return ran
    if isinstance(selection, Ranking):
        return _ranking(call, view, selection, attend, named)
    wanted = _wanted(selection, view)
    if len(wanted) <= view.piece_blocks:
        heads = _by_head(selection, view)
        with view.hold(wanted, heads=heads):
            return attend(replace(call, kv=view.held(wanted, heads))), True
    used: Selection | None = None
    if isinstance(selection, Candidates):
        plain = replace(selection, rest=None)
        selection = used = candidates.choose(call.q, view, plain, scale=call.scale, softcap=call.softcap)
        wanted = _wanted(selection, view)
    part = replace(call, selection=selection, want_weights=False)
    return _in_pieces(part, view, wanted, attend, used or selection), False


def _wanted(selection: Selection, view: TieredView) -> np.ndarray:
    """The view's blocks that ``selection`` may read, rising."""
    size = view.block_size
    if type(selection) is Blocks and selection.block_size % size == 0:  # a few of very many
        listed = np.unique(selection.indices[: int(selection.offsets[-1])].cpu().numpy()).astype(np.int64)
        each = selection.block_size // size
        wanted = (listed[:, None] * each + np.arange(each)).ravel()
        return wanted[: np.searchsorted(wanted, view.blocks)]
    return np.nonzero(read_blocks(selection.to(view.device), size).cpu().numpy())[0]


def _by_head(selection: Selection, view: TieredView) -> list[np.ndarray] | None:
    """The same of each KV head, where they lie apart and do not all read the same."""
    mask = read_blocks_by_head(selection.to(view.device), view.block_size) if view.apart else None
    return None if mask is None else [np.nonzero(own)[0] for own in mask.cpu().numpy()]


def _in_pieces(call: Call, view: TieredView, wanted: np.ndarray, attend: Runs, used: Selection) -> Result:
    """Attention over the blocks ``wanted`` (rising), those of one stretch after the other."""
    selection, size = call.selection, view.block_size
    if type(selection) is Band and selection.shape.q_len > 1 and selection.window >= selection.shape.k_len:
        selection = Dense(selection.shape)
    grid = grid_of(selection, size) // size  # blocks
    most = max(grid, view.piece_blocks // 2 // grid * grid)  # one piece is read while the next one comes
    pieces: list[tuple[np.ndarray, int, int]] = []
    cells = wanted // grid
    start = 0
    while start < len(wanted):
        stop = len(wanted)
        if stop - start > most:
            stop = int(np.searchsorted(cells, cells[start + most], "left"))  # whole cells of the grid
        first, last = int(cells[start]) * grid * size, min((int(cells[stop - 1]) + 1) * grid * size, view.length)
        pieces.append((wanted[start:stop], first, last))
        start = stop
    out = torch.zeros(call.q.shape, dtype=torch.promote_types(call.q.dtype, torch.float32), device=call.q.device)
    lse = torch.full(call.q.shape[:2], -torch.inf, device=call.q.device)
    backend = ""
    ahead = None
    try:
        for at, (blocks, first, last) in enumerate(pieces):
            hold = view.hold(blocks) if ahead is None else ahead
            ahead = None
            with hold:
                if at + 1 < len(pieces) and len(pieces[at + 1][0]) <= view.tiers.room_in(view.layer):
                    ahead = _begin(view, pieces[at + 1][0])
                part = replace(call, kv=view.held(blocks), selection=between(selection, first, last))
                ran = _one(part, attend)
            out, lse = merge_state(out, lse, ran.out, ran.lse.to(lse.dtype))
            backend = ran.backend
    finally:
        if ahead is not None:
            ahead.release()
    return Result(out.to(call.q.dtype), lse, used, backend or "reference")


def _begin(view: TieredView, blocks: np.ndarray) -> Hold | None:
    """The next piece's hold, or None where there is no room for two."""
    try:
        return view.hold(blocks, ahead=True)
    except TierFull:
        return None


def _one(call: Call, attend: Runs) -> Result:
    if not isinstance(call.selection, Between):
        return attend(call)
    out, lse = reference.attend(call.q, call.kv, call.selection, scale=call.scale, softcap=call.softcap)
    return Result(out, lse, call.selection, "reference")


def _ranking(call: Call, view: TieredView, ranking: Ranking, attend: Runs, named: str) -> tuple[Result, bool]:
    """A kernel goes through the ranking with its first blocks resident; what it read counts if it stopped there. Past
    them it read zeros: then more are brought in."""
    total = ranking.total
    count = min(total, view.hints.get(view.layer, FIRST_RANKED))
    nothing = view.held(np.zeros(0, dtype=np.int64))
    if view.device.type == "cpu":
        kernels = named in ("auto", "cpu") and cpu_blocks.serves(call.q, nothing, ranking) is None
    else:
        kernels = named in ("auto", "triton") and triton.serves(call.q, nothing, ranking) is None
    while kernels:
        if count > ranking.order.shape[1]:
            ranking = ranking.whole()
        first = ranking.prefix([count] * ranking.units)
        wanted = _wanted(first, view)
        if len(wanted) > view.piece_blocks:
            break
        heads = _by_head(first, view)
        with view.hold(wanted, heads=heads):
            result = attend(replace(call, kv=view.held(wanted, heads), selection=ranking))
        read = int(_read(result.used, ranking).max())
        if read <= count:
            view.hints[view.layer] = max(LEAST_RANKED, read + read // 4)
            return result, True
        count = min(total, 2 * count)
    q, scale, softcap = call.q, call.scale, call.softcap
    out, lse, used, coverage = attend_ranking(q, view, ranking.whole(), scale=scale, softcap=softcap)
    return Result(out, lse, used, "reference", coverage=coverage), False


def _read(used: Selection, ranking: Ranking) -> Tensor:
    """How many ranked blocks each unit has read."""
    offsets = used.offsets  # type: ignore[attr-defined]
    return offsets.diff() - ranking.always.shape[1]
