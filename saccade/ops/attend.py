"""The front door of ops: ``attend(q, kv, selection) -> (out, lse)`` on the best backend that can do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.tiered import TieredView
from saccade.kv.view import KVView
from saccade.ops import debug, tiered
from saccade.ops.backends import CPU, FA4, NAMED, REFERENCE, TRITON
from saccade.ops.call import Backend, Call, KVLike, Result, pair
from saccade.ops.mean_tail import mean_tail
from saccade.ops.merge import merge_state
from saccade.ops.weights import selected_weights
from saccade.selection import Candidates, Corrected, Selection

BACKENDS = ("auto", *(name for name in NAMED if name != FA4.name))  # that serve calls of every kind


def attend(
    q: Tensor,
    kv: KVLike | Sequence[KVView],
    selection: Selection | Sequence[Selection] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` over the selected keys.

    ``q`` [heads, q_len, head_dim] with ``kv`` a KVView, or a pair of tensors [kv_heads, k_len, head_dim]. A batch is
    ``q`` [batch, heads, q_len, head_dim] with a list of views or a pair of 4-D tensors, and one selection for all or a
    list. ``selection=None`` is dense causal attention with the rows at the end of the keys. ``scale`` defaults to 1 /
    sqrt(head_dim). Returns ``out`` like q and ``lse`` float32 of q's shape without its last axis; a row without keys
    gives ``(0, -inf)``. :func:`run` also says what was read.

    A selection is trusted: looking at its lists would take longer than a decode step. ``Selection.check`` tells whether
    they are sorted, unique, causal and in range. Lists that are not make kernels read outside of the keys.

    Raises SaccadeError for shapes that do not fit, and for a ``backend`` that cannot serve the call, with its reason.
    """
    if q.dim() == 4:
        return _attend_batch(q, kv, selection, scale, softcap, backend, threads)
    result = run(Call.of(q, kv, selection, scale=scale, softcap=softcap, threads=threads), backend)
    return result.out, result.lse


def run(call: Call, backend: str = "auto") -> Result:
    """``call`` on a backend by name, or on the best that serves it: the kernels of q's device, else the reference.

    Raises SaccadeError for a call that does not fit together, and for a backend that cannot serve it, with its reason.
    """
    call.check()
    if isinstance(call.selection, Corrected):
        return _corrected(call, call.selection, backend)
    if isinstance(call.kv, TieredView):
        result, whole = tiered.run(call, call.kv, partial(run, backend=backend), backend)
        if whole:
            return result
    else:
        if debug.ON:
            debug.check(call.kv, call.selection)
        result = _chosen(call, backend).kernel(call)(call)
    if call.want_weights and result.weights is None:
        used = result.used.to(call.q.device)
        weights = selected_weights(call.q, call.kv, used, result.lse, scale=call.scale, softcap=call.softcap)
        result = result._replace(weights=weights)
    if isinstance(call.selection, Candidates) and call.selection.rest is not None:  # no part of what was read
        rest_lse, rest_value = (part.to(call.q.device)[:, None] for part in call.selection.rest)
        out, lse = merge_state(result.out, result.lse, rest_value, rest_lse)
        result = result._replace(out=out, lse=lse)
    return result


def _corrected(call: Call, corrected: Corrected, backend: str) -> Result:
    """What a backend reads, and block means for what it does not: in one go where the device's kernels can."""
    if isinstance(call.kv, TieredView):
        raise SaccadeError(
            "tail=mean needs the means of all blocks: it does not run with kv_host or kv_disk; leave one"
        )
    on_device = backend == "triton" or (backend == "auto" and call.q.is_cuda)
    if on_device and not call.want_weights and TRITON.serves(call) is None:
        if debug.ON:
            debug.check(call.kv, corrected.inner)
        return TRITON.attend(call)._replace(used=corrected.inner)
    ran = run(replace(call, selection=corrected.inner), backend)
    out, lse = mean_tail(call.q, call.kv, corrected, ran.used, scale=call.scale, softcap=call.softcap)
    out, lse = merge_state(ran.out, ran.lse, out, lse)
    return ran._replace(out=out, lse=lse)


def _chosen(call: Call, name: str) -> Backend:
    if name == "auto":
        kernels: Backend = TRITON if call.q.is_cuda else CPU
        return kernels if kernels.serves(call) is None else REFERENCE
    backend = NAMED.get(name)
    if backend is None:
        raise SaccadeError(f"unknown backend {name!r}; known: auto, {', '.join(NAMED)}")
    why = backend.serves(call)
    if why is not None:
        raise SaccadeError(
            f"backend {name!r} cannot run {type(call.selection).__name__} in {call.q.dtype} with head_dim "
            f"{call.q.shape[-1]} on {call.q.device}: {why}; use backend='auto'"
        )
    return backend


def _attend_batch(
    q: Tensor,
    kv: KVLike | Sequence[KVView],
    selection: Selection | Sequence[Selection] | None,
    scale: float | None,
    softcap: float | None,
    backend: str,
    threads: int | None,
) -> tuple[Tensor, Tensor]:
    if isinstance(kv, tuple) and len(kv) == 2 and isinstance(kv[0], Tensor):
        k, v = pair(kv)
        if k.shape[0] != v.shape[0]:
            raise SaccadeError(f"k and v must hold as many sequences, got {k.shape[0]} and {v.shape[0]}")
        views = [KVView.from_tensors(*one) for one in zip(k, v)]
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
