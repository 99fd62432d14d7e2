"""Decode method states while turns are prefilled: the queries kept for them, the states built from these, and the keys
evicted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.rows.freezing import is_frozen
from saccade.engine.steps.step import ScheduledRequest
from saccade.methods.base import Chunk, Evicting
from saccade.selection import Shape


def gone_before(rows: ScheduledRequest, memory: SequenceMemory, layer: int) -> Tensor | None:
    """What earlier turns evicted from a layer. The state that knows of the last one gives way to a new prefill."""
    state = memory.states[layer]
    if rows.phase == "prefill" and isinstance(state, Evicting):
        gone = state.gone()
        memory.gone[layer] = gone if bool(gone.any()) else None
        memory.watched[layer], memory.states[layer] = state, None
    return memory.gone[layer]


def follow_prefill(rows: ScheduledRequest, memory: SequenceMemory, chunk: Chunk, slides: bool) -> None:
    """After rows of a prefill were attended: let the decode method watch, keep the last queries that it asks for, and
    begin its state when the prefill ends. A layer that ``slides`` decodes without one."""
    method, layer, q = rows.policy.decode, chunk.layer, chunk.q
    if method.watches and not slides:
        memory.watched[layer] = method.watch(replace(chunk, states=()) if rows.after_cut else chunk)
    first = chunk.shape.q_start
    if first == rows.span_start or is_frozen(rows, first - 1, layer, chunk.layers, memory.kv.layers):
        memory.tails[layer] = None
    if method.tail_rows > 0:
        before = memory.tails[layer]
        joined = q if before is None else torch.cat([before, q], 1)
        memory.tails[layer] = joined[:, -method.tail_rows :].clone()
    if rows.ends_span and chunk.shape.k_len == rows.stop:
        kept = memory.tails[layer]
        tail = q[:, -1:] if kept is None else kept
        shape = Shape.suffix(tail.shape[0], chunk.kv.kv_heads, tail.shape[1], chunk.kv.length, tail.device)
        segment = replace(chunk, q=tail, shape=shape, past=memory.watched[layer])
        memory.states[layer] = None if slides else method.begin(segment)
        if layer == 0 and method.extra_memory is not None:
            chunk.cost.notes.append(f"decode: {method.extra_memory}")
        memory.watched[layer] = memory.tails[layer] = None
