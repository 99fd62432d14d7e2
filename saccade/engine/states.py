"""What the decode method of a sequence learns while its turns are prefilled: tails, states, and what was evicted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.engine.freezing import is_frozen
from saccade.engine.request import Work
from saccade.methods.base import Chunk, Evicting
from saccade.selection import Shape


def gone_before(work: Work, layer: int) -> Tensor | None:
    """What earlier turns evicted from a layer. The state that knows of the last one gives way to a new prefill."""
    sequence = work.request.sequence
    state = sequence.states[layer]
    if work.phase == "prefill" and isinstance(state, Evicting):
        gone = state.gone()
        sequence.gone[layer] = gone if bool(gone.any()) else None
        sequence.watched[layer], sequence.states[layer] = state, None
    return sequence.gone[layer]


def follow_prefill(work: Work, chunk: Chunk, slides: bool) -> None:
    """After rows of a prefill were attended: let the decode method watch, keep the last queries that it asks for, and
    begin its state when the prefill ends. A layer that ``slides`` decodes without one."""
    sequence, method, layer, q = work.request.sequence, work.policy.decode, chunk.layer, chunk.q
    if method.watches and not slides:
        sequence.watched[layer] = method.watch(replace(chunk, states=()) if work.after_cut else chunk)
    first = chunk.shape.q_start
    if first == work.span_start or is_frozen(work, first - 1, layer):
        sequence.tails[layer] = None
    if method.tail_rows > 0:
        before = sequence.tails[layer]
        joined = q if before is None else torch.cat([before, q], 1)
        sequence.tails[layer] = joined[:, -method.tail_rows :].clone()
    if work.ends_span and chunk.shape.k_len == work.stop:
        kept = sequence.tails[layer]
        tail = q[:, -1:] if kept is None else kept
        shape = Shape.suffix(tail.shape[0], chunk.kv.kv_heads, tail.shape[1], chunk.kv.length)
        segment = replace(chunk, q=tail, shape=shape, past=sequence.watched[layer])
        sequence.states[layer] = None if slides else method.begin(segment)
        sequence.watched[layer] = None
