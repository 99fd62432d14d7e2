"""True attention of the query heads of one KV head at one row, in float32: what an audit holds a sparse step against.

On a CPU it is one call of a kernel (``csrc/group_truth.h``) that reads the paged keys where they lie; elsewhere, and
for keys that no kernel reads, torch computes the same. A GPU has all places of a step in one launch
(``ops/triton/truth.py``)."""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.row_formats import RowFormat
from saccade.kv.view import KVView
from saccade.ops import cpu
from saccade.ops.cpu_structs import ALL_KEYS, Reads, band_keys, native
from saccade.selection import Shape

PART = 4096  # keys turned to float32 at once: they stay in a core's cache
DEVICE_PART = 65536


class Truth(NamedTuple):
    """True attention of one group's query heads: ``out`` fp32 [group, head_dim], ``lse`` fp32 [group] over keys alone,
    ``scale`` fp32 [group] the sum of weight times the value's norm."""

    out: Tensor
    lse: Tensor
    scale: Tensor

    def with_sinks(self, sinks: Tensor) -> Truth:
        """With extra logits [group] that carry no value; the lse stays that of keys."""
        kept = torch.exp(self.lse - torch.logaddexp(self.lse, sinks.to(self.lse.dtype)))
        return Truth(self.out * kept[:, None], self.lse, self.scale * kept)


def group_truth(
    q: Tensor,
    kv: KVView,
    kv_head: int,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    threads: int | None = None,
) -> Truth:
    """Attention of one row, ``q`` [heads, head_dim] of a whole layer, over all keys of ``kv`` (with ``window`` the last
    so many), for the query heads of ``kv_head``. SaccadeError where some of these keys are in a tier."""
    if cpu.serves(q[:, None], kv) is None and (q.is_cuda or not _absent(kv, kv_head, window)):
        return _by_kernel(q, kv, kv_head, scale, softcap, window, threads)
    group = q.shape[0] // kv.kv_heads
    return by_torch(q[kv_head * group :][:group], kv, kv_head, scale=scale, softcap=softcap, window=window)


def _by_kernel(
    q: Tensor, kv: KVView, kv_head: int, scale: float, softcap: float | None, window: int | None, threads: int | None
) -> Truth:
    heads, width = q.shape
    call = Reads(q[:, None], kv, Shape.suffix(heads, kv.kv_heads, 1, kv.length, q.device), scale, softcap, threads)
    group = heads // kv.kv_heads
    made = torch.empty(group * (width + 2), device="cpu")
    out, lse, norm = made.split([group * width, group, group])
    wanted = native.GroupTruth(kv_head=kv_head, out=out.data_ptr(), lse=lse.data_ptr(), scale=norm.data_ptr())
    keys = ALL_KEYS if window is None or window >= kv.length else band_keys(window, 0)
    cpu.kernels().group_truth(call.threads, call.pool, call.table, call.queries(), keys, wanted)
    return Truth(out.view(-1, width), lse, norm)


def _slots(kv: KVView, kv_head: int, window: int | None) -> tuple[Tensor, int]:
    """Where the keys lie, int32 [blocks], and how many of the first block's are not read."""
    own = kv.paged()
    start = 0 if window is None else max(0, kv.length - window)
    size = own.format.block_size
    table = own.block_table[0 if own.block_table.shape[0] == 1 else kv_head]
    return table[start // size : own.format.blocks(kv.length)], start % size


def _absent(kv: KVView, kv_head: int, window: int | None) -> bool:
    return bool((_slots(kv, kv_head, window)[0] < 0).any())


def by_torch(
    query: Tensor, kv: KVView, kv_head: int, *, scale: float, softcap: float | None = None, window: int | None = None
) -> Truth:
    """:func:`group_truth` of the group's own queries [group, head_dim], in torch."""
    table, skip = _slots(kv, kv_head, window)
    if not query.is_cuda and bool((table < 0).any()):
        raise SaccadeError("some of its keys are in a tier")
    own, slots, on_device = kv.paged(), table.long(), query.is_cuda
    size = own.format.block_size
    query = query.float() * scale
    step = (DEVICE_PART if on_device else PART) // size
    count = kv.length - (0 if window is None else max(0, kv.length - window)) + skip
    places = slots * own.format.kv_heads + kv_head  # of single heads' parts of blocks
    keys, values = own.k.flatten(0, 1), own.v.flatten(0, 1)
    group, width = query.shape
    room = _room("rows", (step, *own.k.shape[2:]), own.k)

    def read(pool: Tensor, chosen: Tensor, rows: RowFormat) -> Tensor:
        return own.format.decode(torch.index_select(pool, 0, chosen, out=room[: len(chosen)]).flatten(0, 1), rows)

    exact = _room("exact", (step * size, width), query)
    scores = _room("scores", (group, len(places) * size), query)
    for at, chosen in zip(range(0, len(places) * size, step * size), places.split(step)):
        part = exact[: len(chosen) * size]
        part.copy_(read(keys, chosen, own.format.k))
        scores[:, at : at + len(part)] = query @ part.T
    scores = scores[:, :count]
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores[:, :skip] = -torch.inf
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse[:, None]).exp_()
    out, norm = torch.zeros_like(query), torch.zeros_like(lse)
    ones = query.new_ones(width)
    for chosen, weight in zip(places.split(step), weights.split(step * size, 1)):
        part = exact[: weight.shape[1]]
        part.copy_(read(values, chosen, own.format.v)[: len(part)])
        out += weight @ part
        norm += weight @ torch.mv(part.square_(), ones).sqrt_()  # a product is faster than a norm
    return Truth(out, lse, norm)


_rooms = threading.local()


def _room(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor to write to, kept for the next call: fresh memory costs more than what is done in it."""
    if like.is_cuda:  # whose allocator keeps memory itself
        return like.new_empty(shape)
    held: dict[Any, Tensor] = _rooms.__dict__.setdefault("held", {})
    count, key = math.prod(shape), (name, like.dtype)
    if key not in held or held[key].numel() < count:
        with torch.inference_mode(False):  # in which it may be written to later, too
            most = max(count, 2 * held[key].numel() if key in held else 0)
            held[key] = torch.empty(most, dtype=like.dtype, device="cpu")
    return held[key][:count].view(shape)
