"""Which candidates of a decode step are read: exact scores, then the best of every unit. That is the reference; the C++
kernels do the same in one pass with the attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.reference import logits
from saccade.selection import Candidates, Shape, Tokens


def choose(q: Tensor, kv: KVView, selection: Candidates, *, scale: float, softcap: float | None = None) -> Tokens:
    """What ``q`` [heads, 1, head_dim] reads: the forced keys and the best candidates of every unit. One list a unit, or
    one a query head where some are idle."""
    shape, units = selection.shape, selection.units
    per_unit = shape.heads // units
    first, last = selection.forced
    device = selection.offsets.device
    forced = torch.cat([torch.arange(first, device=device), torch.arange(last, shape.k_len, device=device)])
    idle = selection.idle.tolist() if selection.idle is not None else [False] * shape.heads
    read: list[Tensor] = []
    for unit in range(units):
        heads = range(unit * per_unit, (unit + 1) * per_unit)
        listed, k = selection.listed(unit), int(selection.k[unit])
        if listed.numel() > k:
            voters = [head for head in heads if not idle[head]]
            listed = listed[_best(q, kv, voters, listed, forced, k, shape.group, scale, softcap)]
        read.append(torch.cat([forced, listed]))
    if any(idle):
        few = torch.arange(min(selection.idle_keys, shape.k_len), device=device)
        read = [few if idle[head] else read[head // per_unit] for head in range(shape.heads)]
    return Tokens.from_lists(shape, read)


def visible(kv: KVView, selection: Candidates) -> tuple[KVView, Candidates]:
    """``kv`` without the pages that ``selection`` hides, and the same choice among what is left: a kernel then reads
    what is visible and nothing else. Where the hidden keys are not whole pages, ``kv`` itself and lists."""
    (start, stop), page, shape = selection.hidden, kv.block_size, selection.shape
    if start % page or stop % page:
        return kv, selection.spelt_out()
    paged = kv.paged()
    table = torch.cat([paged.block_table[:, : start // page], paged.block_table[:, stop // page :]], 1)
    indices = selection.indices
    return KVView(paged._replace(block_table=table, length=kv.length - (stop - start))), replace(
        selection,
        shape=Shape.suffix(shape.heads, shape.kv_heads, 1, shape.k_len - (stop - start), shape.device),
        indices=torch.where(indices >= stop, indices - (stop - start), indices),
        hidden=(0, 0),
    )


def put_back(read: Tokens, selection: Candidates) -> Tokens:
    """What was ``read`` of :func:`visible`, at its positions in the whole."""
    shape, (start, stop) = selection.shape, selection.hidden
    if read.shape == shape:
        return read
    return Tokens(shape, read.offsets, torch.where(read.indices >= start, read.indices + (stop - start), read.indices))


def _best(
    q: Tensor,
    kv: KVView,
    heads: list[int],
    listed: Tensor,
    forced: Tensor,
    k: int,
    group: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Places in ``listed`` of the ``k`` best, ties to the lower index."""
    if not heads:
        return listed[:0]
    if len(heads) == 1:
        keys, _ = kv.take(listed, heads[0] // group)
        scores = logits(q[heads[0]].float() * scale, keys.float(), 1.0, softcap)[0]
    else:
        scores = torch.zeros(listed.numel(), device=q.device)
        for head in heads:
            keys, _ = kv.take(torch.cat([listed, forced]), head // group)
            own = logits(q[head].float() * scale, keys.float(), 1.0, softcap)[0]
            scores += torch.softmax(own, 0)[: listed.numel()]
    return torch.sort(scores, descending=True, stable=True).indices[:k]
