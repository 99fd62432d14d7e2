"""Watching an engine from outside for the length of a block: its attention calls, its logits, where its time goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from saccade.engine.core import Engine
from saccade.engine.watch.clock import Clock
from saccade.engine.watch.observe import LogitsObserver, Observer
from saccade.errors import RequestError


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
    from which no token is chosen. They lie on the model's device. What it raises fails the row's
    request, on the row path all requests of the pass.

    Decode rows run as they do without it, in recorded steps on a GPU, none of which is launched ahead meanwhile. Rows
    that are computed again after a preemption are seen again. Observers nest: each block restores the one before.
    """
    watch = engine.watch
    before, watch.logits = watch.logits, observer
    try:
        yield
    finally:
        watch.logits = before


@contextmanager
def timing(engine: Engine, clock: Clock) -> Iterator[None]:
    """Time ``selection`` and ``attention`` of every call of ``engine`` within the block, and as ``linear`` the layers'
    other work where no module does it."""
    before, engine.watch.clock = engine.watch.clock, clock
    engine.model.runner.watch(clock)
    try:
        yield
    finally:
        engine.watch.clock = before
        engine.model.runner.watch(before)
