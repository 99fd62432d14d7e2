"""What stands for blocks that a row reads nothing of: their mean key and mean value, as often as they have keys.

The means are a block_size-th of the keys. What this gives joins what any kernel read by log-sum-exp (see merge). torch
computes it, on the device of the keys, where no kernel does: on a GPU prefills add means within their own loop
(triton/prefill.py), and single rows have a kernel (triton/means.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import triton
from saccade.ops.reference import logits
from saccade.selection import Blocks, Corrected, Dense, Selection, gone_for
from saccade.selection.csr import list_ids

MOST = 2**22  # scores held at once: 16 MiB


def mean_tail(
    q: Tensor, kv: KVView, corrected: Corrected, used: Selection, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the means of the blocks that ``corrected`` represents where ``used`` is what was read.

    ``q`` [heads, q_len, head_dim]. Returns ``out`` fp32 [heads, q_len, head_dim] and ``lse`` fp32 [heads, q_len] of the
    logits q . mean key, each with the weight of ``block_size`` keys; rows without such a block give ``(0, -inf)``.
    """
    shape, size = corrected.shape, corrected.block_size
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    if q.is_cuda and isinstance(used, Blocks) and triton.serves_means(q, kv, used, corrected) is None:
        from saccade.ops.triton.means import attend_means

        return attend_means(q, kv, used.to(q.device), scale, softcap)
    full = (shape.q_start + shape.q_len) // size  # blocks that the last row sees whole
    if full == 0 or isinstance(used, Dense):
        return out, lse
    keys, values = (kv.summary(kind, size)[:full, 0] for kind in ("mean", "mean_value"))  # [full, G, d]
    last_keys = torch.arange(1, full + 1, device=q.device) * size - 1
    units = math.lcm(used.units, shape.kv_heads)
    heads, step = shape.heads // units, max(1, MOST // (full * shape.heads // units))
    evicted = None if corrected.gone is None else _blocks_gone(gone_for(corrected.gone, units), size, full)
    for unit in range(units):
        rows_of, kv_head = slice(unit * heads, (unit + 1) * heads), unit * shape.kv_heads // units
        k, v = keys[:, kv_head].float(), values[:, kv_head].float()
        listed = _listed(used, unit * used.units // units, size, full)
        for start in range(0, shape.q_len, step):
            stop = min(start + step, shape.q_len)
            rows = torch.arange(shape.q_start + start, shape.q_start + stop, device=q.device)
            if listed is None:
                read = _read(used, unit * used.units // units, start, stop, size, full).to(q.device)
            else:
                read = listed.to(q.device)[rows // size - shape.q_start // size]
            stands = ~read & (rows[:, None] >= last_keys)
            if evicted is not None:
                stands &= ~evicted[unit].to(q.device)
            scores = logits(q[rows_of, start:stop].float(), k, scale, softcap) + math.log(size)
            scores = scores.masked_fill(~stands, -torch.inf)
            lse[rows_of, start:stop] = torch.logsumexp(scores, -1)
            none = ~stands.any(-1)
            out[rows_of, start:stop] = torch.softmax(scores, -1).masked_fill(none[:, None], 0.0) @ v
    return out, lse


def _listed(used: Selection, unit: int, size: int, full: int) -> Tensor | None:
    """bool [query blocks, full]: the blocks that a unit's lists name; None for what has no lists of such blocks."""
    if not isinstance(used, Blocks) or used.block_size != size:
        return None
    offsets = used.offsets[unit * used.q_blocks : (unit + 1) * used.q_blocks + 1]
    mask = torch.zeros(used.q_blocks, -(-used.shape.k_len // size), dtype=torch.bool, device=offsets.device)
    mask[list_ids(offsets), used.indices[int(offsets[0]) : int(offsets[-1])].long()] = True
    return mask[:, :full]


def _read(used: Selection, unit: int, start: int, stop: int, size: int, full: int) -> Tensor:
    """bool [stop - start, full]: the blocks of which rows ``start .. stop - 1`` of a unit read some key."""
    tile = max(1, MOST // used.shape.k_len)
    parts = []
    for a in range(start, stop, tile):
        mask = used.row_mask(unit, a, min(a + tile, stop))
        parts.append(mask[:, : full * size].unflatten(1, (full, size)).any(-1))
    return torch.cat(parts)


def _blocks_gone(gone: Tensor, size: int, full: int) -> Tensor:
    """bool [units, full]: blocks with an evicted key. ``gone`` [units, m]."""
    padded = torch.nn.functional.pad(gone[:, : full * size], (0, max(0, full * size - gone.shape[1])))
    return padded.unflatten(1, (full, size)).any(-1)
