"""Prefills of layers whose keys are latents, attended by the keys and values of every head.

A latent of 576 channels stands for a key of 192 and a value of 128 channels of each head. Where many rows read the same
tokens, making keys and values from latents first takes fewer products than attending the latents, and each head has
keys of its own to choose among. Keys and values are made for one layer and a group of heads at a time, as many heads as
:data:`ROOM` holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from saccade.engine.rows.calls import RequestRows, Setting, choose, chunk_of, read
from saccade.engine.rows.states import follow_prefill
from saccade.engine.steps.step import CallCount, ReadPairs
from saccade.engine.watch.observe import AttentionCall
from saccade.kv import KVFormat, KVStorage
from saccade.kv.paged import Paged
from saccade.kv.view import KVView
from saccade.methods.base import Cost
from saccade.models.interface import LatentRows, LayerAttention
from saccade.ops.pairs import pairs
from saccade.selection import Band, Dense, Selection

ROOM = 1 << 30  # bytes of keys and values that are there at once
TILE = 2048  # tokens whose keys and values are made at once
WHOLE = 16  # channels that kernels read rows in


def expands(setting: Setting, rows: RequestRows, spec: LayerAttention, count: int) -> bool:
    """Whether ``count`` rows of a request are attended so: rows of a prefill, by every method that chooses for each
    head by itself and by what is there, and densely where that takes fewer products, unless an observer looks on."""
    latent, method = spec.latent, rows.method
    if latent is None or rows.decodes or rows.together:
        return False
    if method.means_dense:
        return count >= latent.pays_from and not setting.watch.sees_calls
    by_head = not (method.joins_heads or method.numbers_heads)
    return by_head and not method.asks_states and method.calibration is None


def attend(
    setting: Setting,
    rows: RequestRows,
    layer: int,
    q: Tensor,
    spans: Sequence[tuple[int, int]],
    first: int,
    spec: LayerAttention,
) -> Tensor:
    """Attend for the rows of one request, their keys stored: ``q`` [heads, rows, head_dim] as latents meet it, those
    that stand at ``spans`` of the request's rows, of the layer's rows from ``first`` on. The results are taken by
    ``spec.latent``; what is returned, like q, stands for nothing."""
    latent = spec.latent
    assert latent is not None, "keys are latents"
    kv, heads = rows.memory.kv.view(layer), len(q)
    each = heads if setting.watch.sees_calls else _heads_at_once(rows, latent)
    made: list[list[CallCount]] = [[] for _ in spans]
    outs: list[list[Tensor]] = [[] for _ in spans]
    for head in range(0, heads, each):
        group, done = slice(head, min(heads, head + each)), first
        view = expanded_view(kv, latent, group)
        for number, (start, end) in enumerate(spans):
            stop = rows.scheduled.start + end
            asking = _padded(latent.queries[group, done : done + end - start], view.head_dim)
            chosen = choose(setting, rows, layer, asking, stop, spec, view, group)
            ran = read(setting, chosen)
            out = ran.out[..., : latent.value_dim]
            if setting.watch.sees_calls:
                call = AttentionCall(
                    rows.scheduled.request_id, layer, "prefill", chosen.chunk.q, chosen.chunk.kv, ran.used, spec, out
                )
                setting.watch.see(call)
            made[number].append(CallCount.of(layer, ran.used, chosen.chunk.cost, ran.backend))
            outs[number].append(out)
            done += end - start
    done = 0
    for number, (start, end) in enumerate(spans):
        stop, here = rows.scheduled.start + end, slice(done, done + end - start)
        own = chunk_of(setting, rows, layer, q[:, here], stop, spec)
        with setting.timed("selection"):
            follow_prefill(rows.scheduled, rows.memory, own, False)
        _count(rows, layer, made[number], own.cost)
        latent.take(slice(first + here.start, first + here.stop), torch.cat(outs[number]))
        done = here.stop
    return q.new_zeros(1).expand(q.shape)


def expanded_view(kv: KVView, latent: LatentRows, heads: slice) -> KVView:
    """Keys and values of some ``heads`` for all tokens of ``kv``, whose rows are latents; behind what they have, both
    have zeros up to one width."""
    count, length = len(latent.queries[heads]), kv.length
    width = -(-max(latent.queries.shape[-1], latent.value_dim) // WHOLE) * WHOLE
    layout = KVFormat(kv.dtype, count, width, kv.block_size, filled=latent.value_dim)
    storage = KVStorage(layout, layout.blocks(length), kv.device)
    table = torch.arange(storage.num_blocks, dtype=torch.int32, device=kv.device)[None]
    view = KVView(Paged(storage.k, storage.v, table, length, layout), mover=kv.mover)
    for start in range(0, length, TILE):
        stop = min(length, start + TILE)
        k, v = latent.expand(kv.keys(start, stop)[0], heads)
        view.write(start, _padded(k, width), _padded(v, width))
    return view


def _padded(rows: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[-1]))


def _heads_at_once(rows: RequestRows, latent: LatentRows) -> int:
    """Of which keys and values have room, at least one."""
    width = -(-max(latent.queries.shape[-1], latent.value_dim) // WHOLE) * WHOLE
    head = 2 * width * rows.scheduled.stop * latent.queries.element_size()
    return max(1, min(len(latent.queries), ROOM // head))


def _count(rows: RequestRows, layer: int, groups: Sequence[CallCount], cost: Cost) -> None:
    """Write down the calls of groups of heads as one of all; ``cost``: what else it took."""
    used, heads = [one.used for one in groups], [one.used.shape.heads for one in groups]
    for name in ("scored", "estimated"):  # which are of each query head
        sums = sum(getattr(one.cost, name) * share for one, share in zip(groups, heads))
        setattr(cost, name, getattr(cost, name) + round(sums / sum(heads)))
    for note in dict.fromkeys(note for one in (*(group.cost for group in groups), cost) for note in one.notes):
        rows.result.note(note)
    shape = replace(used[0].shape, heads=sum(heads), kv_heads=sum(one.shape.kv_heads for one in used))
    kept: Selection | ReadPairs
    if len({one.even_pairs() for one in used}) == 1 and isinstance(used[0], Dense | Band):
        kept = replace(used[0], shape=shape)
    else:
        parts = [one.pairs if isinstance(one, ReadPairs) else pairs(one) for one in used]
        kinds = [one.kind if isinstance(one, ReadPairs) else type(one) for one in used]
        kept = ReadPairs(shape, torch.cat([one.expand(share) for one, share in zip(parts, heads)]), kinds[0])
    rows.result.calls.append(CallCount(layer, kept, cost, groups[0].backend))
