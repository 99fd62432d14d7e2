"""Watching attention calls from outside: what a call was asked, what it really read, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
