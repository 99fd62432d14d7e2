"""Watching from outside: what attention calls were asked, what they really read, what came out, and the logits of
decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from saccade.errors import RequestError
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
LogitsObserver = Callable[[int, int, Tensor], None]  # request, position of the row, its logits fp32 [vocab]


@contextmanager
def observing(engine: Engine, observer: Observer) -> Iterator[None]:
    """Call ``observer`` after every attention call of ``engine`` within the block. What it raises fails the request.

    Keys that are computed again after a preemption are seen again. Observers nest: each block restores the one before.
    """
    if engine.link is not None:
        raise RequestError(
            f"tensor_parallel_size={engine.link.ranks} leaves a part of the heads to each process; observe with "
            "tensor_parallel_size=1"
        )
    watch = engine.watch
    before, watch.observer = watch.observer, observer
    try:
        yield
    finally:
        watch.observer = before


@contextmanager
def observing_logits(engine: Engine, observer: LogitsObserver) -> Iterator[None]:
    """Call ``observer`` with the logits of every decode row of ``engine`` within the block, those of forced tokens too,
    from which no token is chosen. They lie on the model's device. What it raises fails the requests of the pass.

    Decode rows run on the host path meanwhile, a GPU's too. Rows that are computed again after a preemption are seen
    again. Observers nest: each block restores the one before.
    """
    watch = engine.watch
    before, watch.logits = watch.logits, observer
    try:
        yield
    finally:
        watch.logits = before
