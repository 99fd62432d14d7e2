"""Which kernel serves which selection."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.view import KVView
from saccade.ops.triton.choose import compact
from saccade.ops.triton.common import STORAGE, pad, runs_on
from saccade.ops.triton.decode import KeyLists, Pages, attend_decode
from saccade.ops.triton.lines import attend_lines
from saccade.ops.triton.prefill import attend_prefill
from saccade.ops.triton.progressive import MOST_KEYS, Rule, attend_progressive
from saccade.selection import Band, Blocks, Cone, Dense, Lines, Mixed, Ranking, Selection, Shape, Tokens, Tri, Windowed

MAX_HEAD_DIM = 256
BLOCK_SIZES = (16, 32, 64, 128)


def supports(q: Tensor, kv: KVView, selection: Selection) -> bool:
    """Whether a kernel serves this call: tensors of one dtype (float32, float16 or bfloat16) on one device, head_dim a
    multiple of 16 up to 256, and a Dense, Band, Tri, Blocks or Lines selection (all but Blocks in a window too), one
    of them per head, or Tokens or a Ranking of one row."""
    few, many = sorted((selection.units, kv.kv_heads))
    return (
        runs_on(q)
        and q.device == kv.k_pool.device == kv.v_pool.device
        and q.dtype in STORAGE
        and q.dtype == kv.k_pool.dtype == kv.v_pool.dtype
        and q.stride(-1) == 1
        and kv.head_dim % 16 == 0
        and kv.head_dim <= MAX_HEAD_DIM
        and many % few == 0
        and (_reads(selection) or (type(selection) is Mixed and all(_reads(part) for part in selection.parts)))
    )


def _reads(selection: Selection) -> bool:
    """Whether there is a kernel for this kind and size of selection."""
    one_row = selection.shape.q_len == 1
    if isinstance(selection, Windowed):
        return type(selection.inner) in (Dense, Band, Tri, Lines)
    return (
        type(selection) in (Dense, Band, Tri, Lines)
        or (type(selection) is Blocks and selection.block_size in BLOCK_SIZES)
        or (type(selection) is Tokens and one_row)
        or _reads_ranking(selection)
    )


def attend(
    q: Tensor, kv: KVView, selection: Selection, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, q_len, head_dim] -> ``out`` like q, ``lse`` float32 [heads, q_len]. The caller has checked
    :func:`supports`."""
    kv, selection = on_device(kv, q.device), selection.to(q.device)
    if isinstance(selection, Mixed):
        return _attend_mixed(q, kv, selection, scale, softcap)
    inner, cone = (selection.inner, selection.cone) if isinstance(selection, Windowed) else (selection, None)
    if isinstance(inner, Tri):
        return _attend_tri(q, kv, inner, cone, scale, softcap)
    if isinstance(inner, Lines) or cone is not None:
        return attend_lines(q, kv, _as_lines(inner, q.device), cone, scale=scale, softcap=softcap)
    if selection.shape.q_len > 1 or isinstance(selection, Band):
        assert isinstance(selection, (Dense, Band, Blocks))
        return attend_prefill(q, kv, selection, scale=scale, softcap=softcap)
    # The row reads the keys up to its own, wherever the view ends.
    pages = pages_of([kv.upto(selection.shape.q_start + 1)])
    lists = None if isinstance(selection, Dense) else key_lists(selection)
    out, lse = attend_decode(q[:, 0][None], pages, lists, scale=scale, softcap=softcap)
    return out[0][:, None], lse[0][:, None]


def _attend_mixed(q: Tensor, kv: KVView, mixed: Mixed, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Every part for all heads: lists of heads that chose otherwise are empty and cost next to nothing."""
    done = [attend(q, kv, part, scale=scale, softcap=softcap) for part in mixed.parts]
    out, lse = done[0]
    for number, (other, other_lse) in enumerate(done[1:], start=1):
        mine = mixed.choice == number
        out = torch.where(mine[:, None, None], other, out)
        lse = torch.where(mine[:, None], other_lse, lse)
    return out, lse


def _attend_tri(
    q: Tensor, kv: KVView, tri: Tri, cone: Cone | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The rows of the band, then those that read everything."""
    shape, split = tri.shape, tri.band_rows
    done = []
    for start, stop in ((0, split), (split, shape.q_len)):
        if start == stop:
            continue
        rows = Shape(shape.heads, shape.kv_heads, stop - start, shape.k_len, shape.q_start + start)
        part = Band(rows, window=tri.window, sinks=tri.sinks) if start < split else Dense(rows)
        chosen = part if cone is None else Windowed(part, cone)
        done.append(attend(q[:, start:stop], kv, chosen, scale=scale, softcap=softcap))
    return torch.cat([out for out, _ in done], 1), torch.cat([lse for _, lse in done], 1)


def _as_lines(selection: Selection, device: torch.device) -> Lines:
    """Lines as they are; a band's columns and distances; everything as all distances."""
    if isinstance(selection, Lines):
        return selection
    shape = selection.shape
    end = shape.q_start + shape.q_len
    columns, distances = 0, end
    if isinstance(selection, Band):
        columns, distances = min(selection.sinks, end), min(selection.window, end)
    offsets, numbers = torch.arange(2, device=device), torch.arange(end, dtype=torch.int32, device=device)
    return Lines(shape, offsets * columns, numbers[:columns], offsets * distances, numbers[:distances])


def _reads_ranking(selection: Selection) -> bool:
    """Whether the progressive kernel can follow this ranking: a unit is a KV head, a microbatch is one tile,
    and the rule goes by blocks read, not by estimates."""
    return (
        isinstance(selection, Ranking)
        and selection.units == selection.shape.kv_heads
        and selection.rest != "estimate"
        and 16 <= pad(selection.microbatch, 1) * selection.block_size <= MOST_KEYS
        and selection.order.shape[1] > 0
    )


def attend_ranking(
    q: Tensor, kv: KVView, ranking: Ranking, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Blocks]:
    """``q`` [heads, 1, head_dim]: like :func:`attend`, and the blocks that the rule let it use."""
    kv, ranking = on_device(kv, q.device), ranking.to(q.device)
    pages = pages_of([kv.upto(ranking.shape.q_start + 1)])
    rule = Rule(ranking.epsilon, ranking.microbatch, ranking.rest, ranking.stop)
    out, lse, used, _ = attend_progressive(
        q[:, 0][None],
        pages,
        ranking.always,
        ranking.order,
        ranking.block_size,
        rule,
        scale=scale,
        softcap=softcap,
    )
    blocks = -(-ranking.shape.k_len // ranking.block_size)
    taken = torch.zeros(ranking.units, blocks, dtype=torch.int8, device=q.device)
    rank = torch.arange(ranking.order.shape[1], device=q.device)
    taken.scatter_(1, ranking.order.long(), (rank < used[:, None] * ranking.microbatch).to(torch.int8))
    taken.scatter_(1, ranking.always.long(), 1)
    return out[0][:, None], lse[0][:, None], compact(ranking.shape, ranking.block_size, taken[:, None])


def on_device(kv: KVView, device: torch.device) -> KVView:
    """The view with its table on ``device``."""
    if kv.table.device == device:
        return kv
    return KVView(kv.k_pool, kv.v_pool, kv.table.to(device), kv.length, kv.summaries)


def pages_of(views: list[KVView]) -> Pages:
    """Sequences of one pool as one batch."""
    first = views[0]
    blocks = max(view.blocks for view in views)
    if len(views) == 1:
        tables = first.table[None]
    else:
        tables = torch.stack(
            [torch.nn.functional.pad(view.table[: view.blocks], (0, blocks - view.blocks)) for view in views]
        )
    lengths = torch.empty(len(views), dtype=torch.int32, device=first.k_pool.device)
    for row, view in enumerate(views):
        lengths[row].fill_(view.length)  # a fill, unlike a copy from the host, waits for nothing
    return Pages(first.k_pool, first.v_pool, tables, lengths, max(view.length for view in views))


def key_lists(selection: Selection) -> KeyLists:
    """The lists of a one-row selection; no count is read back to the host."""
    assert isinstance(selection, (Blocks, Tokens))
    size = selection.block_size if isinstance(selection, Blocks) else 1
    longest = min(selection.indices.numel(), -(-selection.shape.k_len // size))
    return KeyLists(selection.offsets, None, selection.indices, selection.units, size, longest)
