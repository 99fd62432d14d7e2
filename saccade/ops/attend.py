"""The front door of ops: ``attend(q, kv, selection) -> (out, lse)`` on the best backend that can do it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import cpu, cpu_blocks, cpu_decode, hash_tables, reference, triton
from saccade.ops.candidates import choose
from saccade.ops.merge import merge_state
from saccade.ops.progressive import attend_ranking
from saccade.ops.weights import selected_weights
from saccade.selection import Candidates, Dense, Ranking, Sampled, Selection, Shape, Tokens

BACKENDS = ("auto", "cpu", "reference", "triton")


@dataclass
class Trace:
    """Filled in by ``attend``: which backend ran, which selection was really read (a Ranking ends as Blocks), and, for
    calls of one row that set ``want_weights``, the softmax weights over it (see ``ops.weights.selected_weights``). Of a
    Ranking also the rule's estimate of each unit's coverage when it stopped, fp32 [units], but on a GPU."""

    backend: str = ""
    used: Selection | None = None
    want_weights: bool = False
    weights: Tensor | None = None
    coverage: Tensor | None = None


def attend(
    q: Tensor,
    kv: KVView | tuple[Tensor, Tensor] | Sequence[KVView],
    selection: Selection | Sequence[Selection] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    threads: int | None = None,
    trace: Trace | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` over the selected keys.

    ``q`` [heads, q_len, head_dim] with ``kv`` a KVView, or a pair of tensors [kv_heads, k_len, head_dim]. A batch is
    ``q`` [batch, heads, q_len, head_dim] with a list of views or a pair of 4-D tensors, and one selection for all or a
    list. ``selection=None`` is dense causal attention with the rows at the end of the keys. ``scale`` defaults to 1 /
    sqrt(head_dim). Returns ``out`` like q and ``lse`` float32 of q's shape without its last axis; a row without keys
    gives ``(0, -inf)``.

    A selection is trusted: its ``check()`` tells whether its lists are sorted, unique, causal and in range, which no
    call can afford to ask, and lists that are not read what is not theirs.

    Raises SaccadeError for shapes that do not fit and for ``backend="cpu"`` where the C++ kernels cannot serve the
    call.
    """
    if q.dim() == 4:
        return _attend_batch(q, kv, selection, scale, softcap, backend, threads)
    if q.dim() != 3:
        raise SaccadeError(f"q must be [heads, q_len, head_dim] or [batch, ...], got shape {tuple(q.shape)}")
    view = kv if isinstance(kv, KVView) else KVView.from_tensors(*_pair(kv))
    if selection is None:
        selection = Dense(Shape.suffix(q.shape[0], view.kv_heads, q.shape[1], view.length))
    if isinstance(selection, Sequence):
        raise SaccadeError("one sequence takes one selection, got a list")
    _check(q, view, selection)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if backend not in BACKENDS:
        raise SaccadeError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    if not math.isfinite(scale):
        raise SaccadeError(f"scale={scale} must be a finite number; leave it None for 1 / sqrt(head_dim)")
    if softcap is not None and not 0 < softcap < math.inf:
        raise SaccadeError(f"softcap={softcap} must be above 0 and finite; leave it None for no cap")
    trace = trace if trace is not None else Trace()
    trace.used, trace.weights, trace.coverage = selection, None, None
    out, lse = _run(q, view, selection, scale, softcap, backend, threads, trace)
    if trace.want_weights and trace.weights is None:
        with indices_on(q.device):
            trace.weights = selected_weights(q, view, trace.used.to(q.device), lse, scale=scale, softcap=softcap)
    return out, lse


def _run(
    q: Tensor,
    view: KVView,
    selection: Selection,
    scale: float,
    softcap: float | None,
    backend: str,
    threads: int | None,
    trace: Trace,
) -> tuple[Tensor, Tensor]:
    if isinstance(selection, Candidates):
        return _attend_candidates(q, view, selection, scale, softcap, backend, threads, trace)
    on_triton = backend == "triton" or (backend == "auto" and q.is_cuda)
    on_triton = on_triton and triton.supports(q, view, selection)
    if isinstance(selection, Ranking) and on_triton:
        trace.backend = "triton"
        out, lse, trace.used = triton.attend_ranking(q, view, selection, scale=scale, softcap=softcap)
        return out, lse
    if isinstance(selection, Ranking) and backend in ("auto", "cpu") and cpu_blocks.supports(q, view, selection):
        trace.backend = f"cpu/{cpu.isa()}"
        out, lse, trace.used, trace.coverage = cpu_blocks.attend_ranking(
            q, view, selection, scale=scale, softcap=softcap, threads=threads
        )
        return out, lse
    if isinstance(selection, Ranking) and backend not in ("cpu", "triton"):
        trace.backend = "reference"
        with indices_on(q.device):
            read = attend_ranking(q, view, selection.to(q.device), scale=scale, softcap=softcap)
        out, lse, trace.used, trace.coverage = read
        return out, lse
    if isinstance(selection, Sampled) and backend in ("auto", "cpu") and hash_tables.supports(q, view, selection):
        trace.backend = f"cpu/{cpu.isa()}"
        return hash_tables.attend_sampled(q, view, selection, scale=scale, softcap=softcap, threads=threads)
    if isinstance(selection, Tokens) and backend in ("auto", "cpu") and cpu_decode.supports(q, view, selection):
        return _gather(q, view, selection, scale, softcap, threads, trace)
    if backend in ("auto", "cpu") and cpu.available() and cpu.supports(q, view, selection):
        trace.backend = f"cpu/{cpu.isa()}"
        return cpu.attend(q, view, selection, scale=scale, softcap=softcap, threads=threads)
    if on_triton:
        trace.backend = "triton"
        return triton.attend(q, view, selection, scale=scale, softcap=softcap)
    if backend == "triton":
        why = "it has no kernel for this call" if triton.available() else triton.why_unavailable()
        raise SaccadeError(
            f"backend 'triton' cannot run {type(selection).__name__} in {q.dtype} with head_dim {q.shape[-1]} on "
            f"{q.device}: {why}; use backend='auto'"
        )
    if backend == "cpu":
        why = "it has no kernel for this call" if cpu.available() else cpu.why_unavailable()
        raise SaccadeError(
            f"backend 'cpu' cannot run {type(selection).__name__} in {q.dtype} with head_dim {q.shape[-1]}: {why}; "
            f"use backend='auto'"
        )
    trace.backend = "reference"
    with indices_on(q.device):
        return reference.attend(q, view, selection.to(q.device), scale=scale, softcap=softcap)


def _attend_candidates(
    q: Tensor,
    view: KVView,
    selection: Candidates,
    scale: float,
    softcap: float | None,
    backend: str,
    threads: int | None,
    trace: Trace,
) -> tuple[Tensor, Tensor]:
    if backend in ("auto", "cpu") and cpu_decode.supports(q, view, selection):
        out, lse = _gather(q, view, selection, scale, softcap, threads, trace)
    else:
        on_triton = backend == "triton" or (backend == "auto" and q.is_cuda)
        on_triton = on_triton and triton.chooses(q, view, selection)
        if on_triton:
            chosen = triton.choose_candidates(q, view, selection, scale=scale, softcap=softcap, room=selection.most)
        else:
            with indices_on(q.device):
                chosen = choose(q, view, selection.to(q.device), scale=scale, softcap=softcap)
        trace.used = chosen
        out, lse = _run(q, view, chosen, scale, softcap, backend, threads, trace)
        if on_triton and trace.want_weights:
            trace.weights = triton.read_weights(q, view, chosen, lse, scale=scale, softcap=softcap)
        if trace.want_weights and trace.weights is None:  # of what was read, before the estimate of the rest joins
            trace.weights = selected_weights(q, view, chosen, lse, scale=scale, softcap=softcap)
    if selection.rest is None:
        return out, lse
    rest_lse, rest_value = (part.to(q.device)[:, None] for part in selection.rest)
    return merge_state(out, lse, rest_value, rest_lse)


def _gather(
    q: Tensor,
    view: KVView,
    selection: Candidates | Tokens,
    scale: float,
    softcap: float | None,
    threads: int | None,
    trace: Trace,
) -> tuple[Tensor, Tensor]:
    trace.backend = f"cpu/{cpu.isa()}"
    out, lse, trace.used, trace.weights = cpu_decode.attend(
        q, view, selection, scale=scale, softcap=softcap, threads=threads, want_weights=trace.want_weights
    )
    return out, lse


def indices_on(device: torch.device) -> AbstractContextManager[object]:
    """Within it, what selections and methods make of indices, masks and scores lies on ``device``."""
    return nullcontext() if device.type == "cpu" else torch.device(device)


def _attend_batch(
    q: Tensor,
    kv: KVView | tuple[Tensor, Tensor] | Sequence[KVView],
    selection: Selection | Sequence[Selection] | None,
    scale: float | None,
    softcap: float | None,
    backend: str,
    threads: int | None,
) -> tuple[Tensor, Tensor]:
    if isinstance(kv, tuple) and len(kv) == 2 and isinstance(kv[0], Tensor):
        k, v = _pair(kv)
        if k.shape[0] != v.shape[0]:
            raise SaccadeError(f"k and v must hold as many sequences, got {k.shape[0]} and {v.shape[0]}")
        views = [KVView.from_tensors(*pair) for pair in zip(k, v)]
    elif isinstance(kv, Sequence) and all(isinstance(view, KVView) for view in kv):
        views = [view for view in kv if isinstance(view, KVView)]
    else:
        raise SaccadeError("a batched q takes a list of views or a pair of tensors [batch, kv_heads, k_len, head_dim]")
    if len(views) != q.shape[0]:
        raise SaccadeError(f"q has a batch of {q.shape[0]} but {len(views)} KV sequences were given")
    chosen = list(selection) if isinstance(selection, Sequence) else [selection] * len(views)
    if len(chosen) != len(views):
        raise SaccadeError(f"{len(views)} sequences but {len(chosen)} selections")
    parts = [
        attend(row, view, one, scale=scale, softcap=softcap, backend=backend, threads=threads)
        for row, view, one in zip(q, views, chosen)
    ]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def _pair(kv: object) -> tuple[Tensor, Tensor]:
    if isinstance(kv, tuple) and len(kv) == 2 and all(isinstance(part, Tensor) for part in kv):
        return kv[0], kv[1]
    raise SaccadeError(f"kv must be a KVView or a pair of tensors (k, v), got {type(kv).__name__}")


def _check(q: Tensor, view: KVView, selection: Selection) -> None:
    shape = selection.shape
    expected = (shape.heads, shape.q_len, view.head_dim)
    if tuple(q.shape) != expected or shape.kv_heads != view.kv_heads or shape.k_len != view.length:
        raise SaccadeError(
            f"q {tuple(q.shape)} and kv [{view.kv_heads}, {view.length}, {view.head_dim}] do not fit a selection of "
            f"{shape.heads} heads, {shape.kv_heads} KV heads, {shape.q_len} rows and {shape.k_len} keys"
        )
    if shape.heads % selection.units:
        raise SaccadeError(f"{selection.units} units of a selection cannot serve {shape.heads} query heads alike")
    if shape.q_len > 1 and isinstance(selection, (Ranking, Candidates)):
        raise SaccadeError(f"{type(selection).__name__} serves one query row, got q_len={shape.q_len}")
