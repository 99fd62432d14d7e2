"""The Triton kernels: attention over ``Dense``, ``Band``, ``Blocks``, ``Tokens`` and ``Ranking`` on a paged KV view on
an NVIDIA GPU (or on CPU tensors under Triton's interpreter, ``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.selection import Blocks, Candidates, Dense, Ranking, Selection, Shape, Tokens

if TYPE_CHECKING:
    from saccade.ops.score_tables import ScoreTables
    from saccade.ops.sharing import Anchors

_installed = importlib.util.find_spec("triton") is not None

# The engine runs methods under an ambient device. While there is one, every attribute of a tensor that is read goes
# through Python, and a launch reads many; the kernels' host code names its devices itself and does without.
_without_ambient_device = torch._C.DisableTorchFunction


def available() -> bool:
    """Whether Triton is installed."""
    return _installed


def why_unavailable() -> str:
    """One sentence naming what is lost, or an empty string when the kernels are there."""
    return "" if _installed else "Triton is not installed; the reference torch backend runs instead, many times slower"


def supports(q: Tensor, kv: KVView, selection: Selection) -> bool:
    """Whether :func:`attend` can serve this call."""
    if not _installed:
        return False
    from saccade.ops.triton import dispatch

    with _without_ambient_device():
        return dispatch.supports(q, kv, selection)


def selects(q: Tensor, kv: KVView) -> bool:
    """Whether the selection kernels can read ``q`` and ``kv``: heads of up to 256 channels, in float32 64."""
    narrow = q.shape[-1] * (1 if q.element_size() == 2 else 4) <= 256
    return narrow and supports(q, kv, Dense(Shape.suffix(q.shape[0], kv.kv_heads, q.shape[1], kv.length)))


def sums(q: Tensor, kv: KVView, rows: int) -> bool:
    """Whether :func:`token_sums` can serve this call."""
    return 1 <= rows <= 128 and selects(q, kv)


def token_sums(
    q: Tensor, kv: KVView, shape: Shape, rows: int, scale: float, softcap: float | None = None, begin: int = 0
) -> tuple[Tensor, Tensor]:
    """See ops.triton.line_sums."""
    from saccade.ops.triton import dispatch, line_sums

    with _without_ambient_device():
        return line_sums.token_sums(q, dispatch.on_device(kv, q.device), shape, rows, scale, softcap, begin)


def chooses(q: Tensor, kv: KVView, selection: Candidates) -> bool:
    """Whether :func:`choose_candidates` and :func:`read_weights` can serve this call."""
    few, many = sorted((selection.units, kv.kv_heads))
    return selects(q, kv) and many % few == 0


def choose_candidates(
    q: Tensor, kv: KVView, selection: Candidates, *, scale: float, softcap: float | None = None, room: int | None = None
) -> Tokens:
    """See ops.triton.candidates."""
    from saccade.ops.triton import candidates, dispatch

    with _without_ambient_device():
        kv, selection = dispatch.on_device(kv, q.device), selection.to(q.device)
        return candidates.choose(q, kv, selection, scale=scale, softcap=softcap, room=room)


def read_weights(
    q: Tensor, kv: KVView, tokens: Tokens, lse: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """See ops.triton.weights."""
    from saccade.ops.triton import dispatch, weights

    with _without_ambient_device():
        kv, tokens = dispatch.on_device(kv, q.device), tokens.to(q.device)
        return weights.read_weights(q, kv, tokens, lse, scale=scale, softcap=softcap)


def share(
    anchors: Anchors, q: Tensor, tau: float, local: int, length: int, cover_gap: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See ops.sharing.share."""
    from saccade.ops.triton import sharing

    with _without_ambient_device():
        return sharing.share(anchors, q, tau, local, length, cover_gap)


def keep(
    anchors: Anchors, at: int, read: Tokens, weights: Tensor, middle: tuple[int, int], best: int, reach: int
) -> None:
    """See ops.sharing.keep."""
    from saccade.ops.triton import sharing

    with _without_ambient_device():
        sharing.keep(anchors, at, read, weights, middle, best, reach)


def learn(tables: ScoreTables, read: Tokens, weights: Tensor, idle: Tensor | None, decay: float) -> None:
    """See ops.score_tables.learn."""
    from saccade.ops.triton import score_tables

    with _without_ambient_device():
        score_tables.learn(tables, read, weights, idle, decay)


def attend(
    q: Tensor, kv: KVView, selection: Selection, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """``q`` [heads, q_len, head_dim] over the selected keys of ``kv``, as ``ops.attend`` defines it."""
    if not _installed:
        raise SaccadeError(why_unavailable())
    from saccade.ops.triton import dispatch

    with _without_ambient_device():
        return dispatch.attend(q, kv, selection, scale=scale, softcap=softcap)


def attend_ranking(
    q: Tensor, kv: KVView, ranking: Ranking, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Blocks]:
    """``q`` [heads, 1, head_dim]: like :func:`attend`, and the blocks that the stopping rule let it use."""
    if not _installed:
        raise SaccadeError(why_unavailable())
    from saccade.ops.triton import dispatch

    with _without_ambient_device():
        return dispatch.attend_ranking(q, kv, ranking, scale=scale, softcap=softcap)
