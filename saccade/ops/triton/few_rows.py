"""Dense attention of a few last rows of several sequences, or within a window, which reads the keys of each once for
all its rows: the counterpart of ``ops.few_rows`` on a GPU.

The rows and the query heads of a KV head are the rows of one tile of the tensor cores, so a verification's attention
costs about what a decode step's does, as long as memory is what takes the time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from saccade.kv.row_formats import format_of
from saccade.kv.view import KVView
from saccade.ops.triton.batch import Pages, pages_of
from saccade.ops.triton.common import pad
from saccade.ops.triton.decode import Tiles, attend_decode, most_lines

LARGE = Tiles(keys=64, warps=8, stages=3, registers=None, resident=2)  # whose queries do not fit few registers
TILE = 64  # rows and query heads of a KV head together, of a group
# Every group turns the codes of coded rows into numbers by itself, so more lines share the work.
CODED_TILE = 128
MOST_ROWS, FEWEST_KEYS = 128, 16384  # of a call whose rows go in groups; with fewer keys launching is what takes time
MOST_CODED = 256  # MOST_ROWS over coded rows, which whole tiles of rows would have copied first
FEW = 32  # query heads of a KV head, times rows, that do


def attend_rows(
    q: Tensor,
    pages: Pages,
    limits: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    tiles: Tiles | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``q`` [n * rows, heads, head_dim], rows of each of the n sequences of ``pages`` one after the other, their keys
    stored; ``limits`` int32 [n * rows]: how many of its sequence's first keys a row reads, 0 for padding, or the last
    ``window`` of them alone. Returns ``out`` like q and ``lse`` float32 [n * rows, heads]."""
    wide = q.shape[0] // len(pages.lengths) * q.shape[1] // pages.k.shape[1]
    tiles = tiles or (None if pad(wide) <= FEW or format_of(pages.k, q.dtype).coded else LARGE)
    return attend_decode(q, pages, None, scale=scale, softcap=softcap, limits=limits, tiles=tiles, window=window)


def attend_few(
    q: Tensor, views: Sequence[KVView], *, scale: float, softcap: float | None = None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, n * rows, head_dim], the last rows of n sequences of one pool one after the other, which ``views``
    show with their keys stored; each reads the keys up to its own, or the last ``window`` of them. Returns ``out`` like
    q and ``lse`` float32 [heads, n * rows]."""
    pages, rows = pages_of(list(views)), q.shape[1] // len(views)
    behind = torch.arange(1 - rows, 1, dtype=torch.int32, device=q.device)
    limits = (pages.lengths[:, None] + behind).flatten()
    out, lse = attend_rows(q.transpose(0, 1), pages, limits, scale=scale, softcap=softcap, window=window)
    return out.transpose(0, 1), lse.transpose(0, 1)


def pays(q: Tensor, kv: KVView, start: int) -> bool:
    """Whether a dense call of the rows ``q`` [heads, t, head_dim] from ``start`` on is :func:`attend_groups`'s: so few
    rows over so many keys that whole tiles of rows would leave most processors idle."""
    most = MOST_CODED if kv.format.k.coded else MOST_ROWS
    return 1 < q.shape[1] <= most and start >= FEWEST_KEYS and kv.length >= start + q.shape[1]


def attend_groups(
    q: Tensor, kv: KVView, start: int, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, t, head_dim], the rows from position ``start`` on of one sequence whose keys are stored; each reads
    all keys up to its own. Rows go in groups that fill a tile with the heads of a KV head, the groups are a batch over
    the same keys, and the keys of each are read in as many parts as fill the device. Returns ``out`` like q and ``lse``
    float32 [heads, t]."""
    heads, count, _ = q.shape
    few = count * (heads // kv.kv_heads) <= TILE
    lines = CODED_TILE if kv.format.k.coded and not few else TILE
    lines = lines if kv.format.joined else min(lines, most_lines(q))  # of latents heads are cut, too
    each = max(1, lines * kv.kv_heads // heads)
    groups = -(-count // each)
    paged = kv.upto(start + count).paged()
    tables = paged.block_table[None].expand(groups, -1, -1).contiguous()
    lengths, limits = _bounds(start, count, groups, each, q.device)
    pages = Pages(paged.k, paged.v, tables, lengths, start + count, value_dim=paged.format.value_dim)
    q = q.transpose(0, 1)
    if groups * each > count:
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, groups * each - count))
    out, lse = attend_rows(q, pages, limits, scale=scale, softcap=softcap)
    return out[:count].transpose(0, 1), lse[:count].transpose(0, 1)


@lru_cache(maxsize=4)  # layers of a step ask for the same
def _bounds(start: int, count: int, groups: int, each: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lengths of the groups and limits of their rows, for Pages and attend_rows."""
    limits = torch.arange(start + 1, start + 1 + groups * each, dtype=torch.int32, device=device)
    lengths = torch.full((groups,), start + count, dtype=torch.int32, device=device)
    return lengths, torch.where(limits <= start + count, limits, 0)
