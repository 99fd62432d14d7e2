"""Candidates of a decode step: blocks joined to lists of them, and which are read: exact scores, then the best of every
unit. That is the reference; the C++ kernels do the same in one pass with the attention."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops import cpu_decode
from saccade.ops.reference import logits
from saccade.selection import Candidates, Shape, Tokens

GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, lie nowhere close to each other


def join_blocks(
    offsets: Tensor, indices: Tensor, blocks: Tensor, size: int, first: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Lists of keys (``offsets`` int64 [units + 1], ``indices`` int32, rising) with the keys ``first .. stop - 1`` of
    ``blocks`` (int32 [units, m], rising, of ``size`` keys) in them: (offsets, indices) likewise, without repeats."""
    if cpu_decode.holds(indices):
        return cpu_decode.join_blocks(offsets, indices, blocks, size, first, stop)
    keys = (blocks.long()[..., None] * size + torch.arange(size)).flatten(1)
    bounds = offsets.tolist()
    lists = [
        torch.unique(torch.cat([indices[start:end].long(), own[(own >= first) & (own < stop)]]))
        for own, start, end in zip(keys, bounds, bounds[1:])
    ]
    counts = torch.tensor([0, *(part.numel() for part in lists)])
    return counts.cumsum(0), torch.cat(lists).to(torch.int32)


def sampled_rest(
    q: Tensor,
    kv: KVView,
    offsets: Tensor,
    indices: Tensor,
    first: int,
    stop: int,
    probes: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Estimated log-sum-exp of one row's logits over the keys ``first .. stop - 1`` that its unit does not list, fp32
    [heads]: from ``probes`` of them that a low-discrepancy sequence spreads over all, each standing for as many as were
    passed over. ``q`` [heads, 1, head_dim]; lists as for ``join_blocks``. -inf where no probe lies outside a list."""
    at = spread_places(stop - first, probes).to(q.device) + first
    if cpu_decode.reads(q, kv) and q.shape[0] % (offsets.numel() - 1) == 0:
        return cpu_decode.probe(q, kv, offsets, indices, at.int(), stop - first, scale, softcap)
    units, heads, size = offsets.numel() - 1, q.shape[0], stop - first
    keyed = indices.long() + torch.repeat_interleave(torch.arange(units) * stop, offsets.diff())
    asked = (at + torch.arange(units)[:, None] * stop).flatten()
    found = torch.searchsorted(keyed, asked).clamp(max=max(0, keyed.numel() - 1))
    out = (keyed[found] != asked if keyed.numel() else torch.ones_like(asked, dtype=torch.bool)).view(units, -1)
    keys = kv.k_pool[kv.table[at // kv.block_size].long(), :, at % kv.block_size].transpose(0, 1)  # [G, m, d]
    scores = logits(q[:, 0].float().unflatten(0, (kv.kv_heads, -1)), keys.float(), scale, softcap).flatten(0, 1)
    per_unit = heads // units
    total = scores.masked_fill(~out.repeat_interleave(per_unit, 0), -torch.inf).logsumexp(-1)
    share = (size - offsets.diff()) / out.sum(-1).clamp(min=1)
    return total + share.clamp(min=1e-30).log().repeat_interleave(per_unit, 0)


def spread_places(size: int, count: int) -> Tensor:
    """At most ``count`` of ``size`` places, spread evenly over them: int64, rising, on the CPU."""
    if size <= count:
        return torch.arange(size, device="cpu")
    return torch.unique_consecutive((_multiples(count) * size).long())


@lru_cache(maxsize=8)
def _multiples(count: int) -> Tensor:
    return torch.sort((torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) * GOLDEN % 1.0).values


def choose(q: Tensor, kv: KVView, selection: Candidates, *, scale: float, softcap: float | None = None) -> Tokens:
    """What ``q`` [heads, 1, head_dim] reads: the forced keys and the best candidates of every unit. One list a unit, or
    one a query head where some are idle."""
    shape, units = selection.shape, selection.units
    per_unit = shape.heads // units
    first, last = selection.forced
    forced = torch.cat([torch.arange(first), torch.arange(last, shape.k_len)])
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
        few = torch.arange(min(selection.idle_keys, shape.k_len))
        read = [few if idle[head] else read[head // per_unit] for head in range(shape.heads)]
    return Tokens.from_lists(shape, read)


def visible(kv: KVView, selection: Candidates) -> tuple[KVView, Candidates]:
    """``kv`` without the pages that ``selection`` hides, and the same choice among what is left: a kernel then reads
    what is visible and nothing else. Where the hidden keys are not whole pages, ``kv`` itself and lists."""
    (start, stop), page, shape = selection.hidden, kv.block_size, selection.shape
    if start % page or stop % page:
        return kv, selection.spelt_out()
    table = torch.cat([kv.table[: start // page], kv.table[stop // page :]])
    indices = selection.indices
    return KVView(kv.k_pool, kv.v_pool, table, kv.length - (stop - start)), replace(
        selection,
        shape=Shape.suffix(shape.heads, shape.kv_heads, 1, shape.k_len - (stop - start)),
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
        return torch.arange(0)
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
