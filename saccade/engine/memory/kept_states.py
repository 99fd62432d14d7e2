"""States of the model's own layers (convolutions, Mamba, delta rule) in a step: pinned before it, changed by its
layers, and copied to a snapshot where one is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from saccade.engine.steps.step import ScheduledRequest
from saccade.kv.state_journal import StateJournal

if TYPE_CHECKING:
    from saccade.engine.memory.sequence_memory import SequenceMemory


def begin(
    scheduled: Sequence[ScheduledRequest],
    memories: Mapping[int, SequenceMemory],
    at_once: bool = True,
    moves: bool = False,
) -> None:
    """The rows of a step are about to be computed, ``at_once`` or with others' steps in between. ``moves``: a device
    may serve single rows, which puts their next states elsewhere. SaccadeError where no state stands before one's."""
    if not scheduled or memories[scheduled[0].sequence_id].kept is None:
        return
    own = [(one, kept) for one in scheduled if (kept := memories[one.sequence_id].kept) is not None]
    for one, kept in own:  # before any other takes the room of a snapshot
        kept.pin(one.start)
        if one.drafts:
            kept.set_aside(one.start)
            kept.journal = StateJournal()
    shared = [shared_before(one, kept.pool.block) for one, kept in own]
    for (one, kept), place in zip(own, shared):
        kept.begin(one.start, keep=place == one.start)
    for (one, kept), place in zip(own, shared):
        if place > one.start and at_once:
            kept.leave(place)
    for one, kept in own:
        if moves and one.phase == "decode" and one.length == 1:
            kept.double()


def end(rows: ScheduledRequest, memory: SequenceMemory) -> None:
    """The step of these rows ended well."""
    if memory.kept is not None:
        memory.kept.end(rows.stop, rows.length, rows.ends_span)


def is_spoilt(memory: SequenceMemory) -> bool:
    """Whether a step that failed has left its sequence's state undefined."""
    return memory.kept is not None and memory.kept.spoilt


def shared_before(rows: ScheduledRequest, block: int) -> int:
    """After how many tokens others may go on that begin like the prefill that these ``rows`` are of, if whole blocks of
    so many tokens are shared; 0 for none among these rows."""
    if not block or rows.phase != "prefill" or rows.policy.selects_by_chunk:
        return 0
    place = max(0, rows.span_stop - max(1, rows.policy.decode.tail_rows)) // block * block
    return place if rows.start <= place < rows.stop else 0
