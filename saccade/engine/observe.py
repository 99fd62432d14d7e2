"""Watching attention calls from outside: what a call was asked, what it really read, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from saccade.kv.view import KVView
from saccade.models.interface import LayerAttention
from saccade.selection import Selection

if TYPE_CHECKING:
    from saccade.engine.core import Engine


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One layer's attention for rows of one request. The tensors are the engine's own: read them, or copy them.

    ``q``, ``out`` [heads, rows, head_dim], post-RoPE, storage dtype. ``kv`` holds every key the rows may see and is
    good for as long as the observer runs. ``selection`` is what was really read (a Ranking ends as Blocks); its shape
    says where the rows stand.
    """

    request: int
    layer: int
    phase: str
    q: Tensor
    kv: KVView
    selection: Selection
    spec: LayerAttention
    out: Tensor


Observer = Callable[[AttentionCall], None]


@dataclass(frozen=True, eq=False)
class AuditSample:
    """One head's attention of one row, to be held against dense attention: ``q``, ``out`` [head_dim]. The row stands at
    ``position``; its keys are those of ``kv_head`` up to its own."""

    request: int
    layer: int
    position: int
    head: int
    q: Tensor
    out: Tensor
    kv: KVView
    kv_head: int
    read: Selection
    spec: LayerAttention


class AuditTap(Protocol):
    """Looks at single heads of single rows, wherever a step runs them."""

    def wants(self, request: int, layer: int, positions: range) -> Iterable[tuple[int, int]]:
        """Pairs (position, head) of a call over rows at ``positions`` that it wants to see."""
        ...

    def take(self, sample: AuditSample) -> None:
        """Take one of them. The tensors are the engine's own, good until this returns."""
        ...


def audit(tap: AuditTap, call: AttentionCall) -> None:
    """Hand what a tap wants of a call to it."""
    shape = call.selection.shape
    positions = range(shape.q_start, shape.q_start + shape.q_len)
    for position, head in tap.wants(call.request, call.layer, positions):
        at = head, position - shape.q_start
        tap.take(
            AuditSample(
                call.request,
                call.layer,
                position,
                head,
                call.q[at],
                call.out[at],
                call.kv,
                head // shape.group,
                call.selection,
                call.spec,
            )
        )


@contextmanager
def observing(engine: Engine, observer: Observer) -> Iterator[None]:
    """Call ``observer`` after every attention call of ``engine`` within the block. What it raises fails the request.

    Keys that are computed again after a preemption are seen again. Observers nest: each block restores the one before.
    """
    watch = engine.watch
    before, watch.observer = watch.observer, observer
    try:
        yield
    finally:
        watch.observer = before
