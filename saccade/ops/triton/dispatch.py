"""Which kernel serves which selection."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kv.row_formats import AUTO
from saccade.kv.view import KVView
from saccade.ops.cpu import uneven
from saccade.ops.triton import serves_heads
from saccade.ops.triton.batch import KeyLists, pages_of
from saccade.ops.triton.batched_guesses import Guesses
from saccade.ops.triton.choose import compact
from saccade.ops.triton.common import STORAGE, pad, runs_on
from saccade.ops.triton.decode import attend_decode
from saccade.ops.triton.few_rows import attend_groups, pays
from saccade.ops.triton.lines import attend_lines
from saccade.ops.triton.means import Means
from saccade.ops.triton.pages import LONG, plain_copy
from saccade.ops.triton.prefill import attend_prefill, config_for
from saccade.ops.triton.progressive import MOST_KEYS, attend_progressive
from saccade.selection import (
    Band,
    Blocks,
    Candidates,
    Cone,
    Corrected,
    Dense,
    Lines,
    Mixed,
    Ranking,
    Selection,
    Shape,
    Tokens,
    Tri,
    Windowed,
)
from saccade.selection.forms import Rule

FEW_ROWS = 8  # up to which a call reads coded rows where they lie
BLOCK_SIZES = (16, 32, 64, 128)
LINE_BYTES = 512  # of a row's channels, of which tiles of lines fit a multiprocessor's shared memory


def serves(q: Tensor, kv: KVView, selection: Selection | None) -> str | None:
    """Why no kernel serves this call; None where one does. They read tensors of one dtype (float32, float16 or
    bfloat16) on one device, with a head_dim that is a multiple of 16 up to 256; a Dense, Band, Tri, Blocks or Lines
    selection (all but Blocks in a window too), one of them per head, or Tokens, Candidates or a Ranking of one row. Of
    latents: Dense, or Blocks, Tokens or Candidates of one row."""
    if kv.in_pieces:
        return "its keys do not fit the memory at once"
    paged = kv.layout()
    if not runs_on(q) or q.device != paged.k.device:
        return f"q lies on {q.device} and the keys on {paged.k.device}, its kernels run on one GPU"
    if q.dtype not in STORAGE or q.dtype != kv.dtype:
        return f"its kernels read queries and keys of one 16- or 32-bit type; got {q.dtype} and {kv.dtype}"
    if kv.format.k is not AUTO and not kv.format.k.coded:
        return f"its kernels read no {kv.format.k.name} rows"
    if not paged.k.is_contiguous() or not paged.v.is_contiguous():
        return "the storage of the keys or values is not contiguous"
    if (reason := serves_heads(kv.head_dim, kv.format.value_dim)) is not None:
        return reason
    if q.stride(-1) != 1:
        return "the channels of a query do not lie together"
    if selection is None:
        return None
    if kv.format.joined:
        return _unread_latents(selection)
    parts = selection.parts if type(selection) is Mixed else (selection,)
    unread = next((why for part in parts if (why := _unread(part)) is not None), None)
    by_lines = any(isinstance(part, (Lines, Windowed)) for part in parts)
    if by_lines and unread is None and kv.head_dim * q.element_size() > LINE_BYTES:
        unread = f"it reads lines of float32 heads of up to {LINE_BYTES // 4} channels; got {kv.head_dim}"
    return unread or uneven(selection.units, kv.kv_heads)


def _unread_latents(selection: Selection) -> str | None:
    """Why there is no kernel for this kind and size of selection of latents, whose one KV head all units share."""
    kind, rows = type(selection), selection.shape.q_len
    if isinstance(selection, Dense) or (rows == 1 and kind in (Tokens, Candidates)):
        return None
    if rows == 1 and isinstance(selection, Blocks):
        return _unread(selection)
    return f"it reads latents by no kernel for {kind.__name__} of {rows} rows"


def _unread(selection: Selection) -> str | None:
    """Why there is no kernel for this kind and size of selection."""
    kind, rows = type(selection), selection.shape.q_len
    if isinstance(selection, Windowed):
        inner = type(selection.inner)
        return None if inner in (Dense, Band, Tri, Lines) else f"it has no kernel for {inner.__name__} in a window"
    if isinstance(selection, Ranking):
        return _unread_ranking(selection)
    if isinstance(selection, Corrected):
        whole = type(selection.inner) is Blocks and selection.inner.block_size == selection.block_size
        if not whole or rows == 1 or selection.gone is not None:
            return "it adds means to many rows' block lists alone, of which nothing was evicted"
        return _unread(selection.inner)
    if isinstance(selection, Blocks) and selection.block_size not in BLOCK_SIZES:
        return f"it reads blocks of {BLOCK_SIZES} keys; got {selection.block_size}"
    if kind in (Dense, Band, Tri, Lines, Blocks) or (kind in (Tokens, Candidates) and rows == 1):
        return None
    return f"it has no kernel for {kind.__name__} of {rows} rows"


def attend(
    q: Tensor, kv: KVView, selection: Selection, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, q_len, head_dim] -> ``out`` like q, ``lse`` float32 [heads, q_len]. The caller has checked
    :func:`serves`."""
    selection = selection.to(q.device)
    few = isinstance(selection, Dense) and pays(q, kv, selection.shape.q_start)
    if kv.format.k.coded and q.shape[1] > FEW_ROWS and not few and not _copies(q, selection):
        # Each tile of rows would turn codes into numbers by itself.
        kv = plain_copy(kv, selection.shape.q_start + q.shape[1])
    if isinstance(selection, Mixed):
        return _attend_mixed(q, kv, selection, scale, softcap)
    if isinstance(selection, Corrected):
        blocks = selection.inner
        assert isinstance(blocks, Blocks)
        return attend_prefill(q, kv, blocks, scale=scale, softcap=softcap, means=Means.of(kv, blocks, q.dtype))
    inner, cone = (selection.inner, selection.cone) if isinstance(selection, Windowed) else (selection, None)
    if isinstance(inner, Tri):
        return _attend_tri(q, kv, inner, cone, scale, softcap)
    if isinstance(inner, Lines) or cone is not None:
        return attend_lines(q, kv, _as_lines(inner, q.device), cone, scale=scale, softcap=softcap)
    if selection.shape.q_len > 1 or isinstance(selection, Band):
        assert isinstance(selection, (Dense, Band, Blocks))
        if few or (kv.format.joined and isinstance(selection, Dense)):
            return attend_groups(q, kv, selection.shape.q_start, scale=scale, softcap=softcap)
        return attend_prefill(q, kv, selection, scale=scale, softcap=softcap)
    # The row reads the keys up to its own, wherever the view ends.
    pages = pages_of([kv.upto(selection.shape.q_start + 1)])
    lists = None if isinstance(selection, Dense) else key_lists(selection)
    out, lse = attend_decode(q[:, 0][None], pages, lists, scale=scale, softcap=softcap)
    return out[0][:, None], lse[0][:, None]


def _copies(q: Tensor, selection: Selection) -> bool:
    """Whether kernels lay out the keys in one piece for this call."""
    if isinstance(selection, (Dense, Band, Blocks)):
        return config_for(q, selection).copy
    return isinstance(selection, Lines) and q.shape[1] >= LONG


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
        rows = Shape(shape.heads, shape.kv_heads, stop - start, shape.k_len, shape.q_start + start, shape.device)
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


def _unread_ranking(ranking: Ranking) -> str | None:
    """Why the progressive kernel cannot follow this ranking; None where it can: a unit is a KV head, and a microbatch
    is one tile."""
    if ranking.units != ranking.shape.kv_heads:
        return f"its rankings have a unit for each KV head; got {ranking.units} for {ranking.shape.kv_heads}"
    if not 16 <= pad(ranking.microbatch, 1) * ranking.block_size <= MOST_KEYS:
        return f"a microbatch must hold 16 to {MOST_KEYS} keys; got {ranking.microbatch} blocks of {ranking.block_size}"
    return None if ranking.order.shape[1] else "there is no block to rank"


def attend_ranking(
    q: Tensor, kv: KVView, ranking: Ranking, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Blocks, Tensor]:
    """``q`` [heads, 1, head_dim]: like :func:`attend`, the blocks that the rule let it use, and its estimate of each
    unit's coverage at the end, fp32 [units], on the device."""
    ranking = ranking.to(q.device)
    pages = pages_of([kv.upto(ranking.shape.q_start + 1)])
    rule = Rule(ranking.epsilon, ranking.microbatch, ranking.rest, ranking.stop, ranking.margin)
    guesses = None if ranking.estimates is None else Guesses.of(ranking.estimates, ranking.microbatch)
    out, lse, used, _, coverage = attend_progressive(
        q[:, 0][None],
        pages,
        ranking.always,
        ranking.order,
        ranking.block_size,
        rule,
        scale=scale,
        softcap=softcap,
        guesses=guesses,
    )
    blocks = -(-ranking.shape.k_len // ranking.block_size)
    taken = torch.zeros(ranking.units, blocks, dtype=torch.int8, device=q.device)
    rank = torch.arange(ranking.order.shape[1], device=q.device)
    taken.scatter_(1, ranking.order.long(), (rank < used[:, None] * ranking.microbatch).to(torch.int8))
    taken.scatter_(1, ranking.always.long(), 1)
    blocks_read = compact(ranking.shape, ranking.block_size, taken[:, None])
    return out[0][:, None], lse[0][:, None], blocks_read, coverage


def key_lists(selection: Selection) -> KeyLists:
    """The lists of a one-row selection; no count is read back to the host."""
    assert isinstance(selection, (Blocks, Tokens))
    size = selection.block_size if isinstance(selection, Blocks) else 1
    longest = min(selection.indices.numel(), -(-selection.shape.k_len // size))
    return KeyLists(selection.offsets, None, selection.indices, selection.units, size, longest)
