"""Short chunks of a dense prefill in recorded steps, such as a question after a long prefix that is stored already:
outside of recorded steps its time would go to launches.

The rows of a chunk are split into pieces of :data:`EACH` tokens, which form a batch over the same keys, as verified
rows do; all rows are stored before any is attended. What a decode method learns from the rows it learns after the step,
layer by layer, from the queries that the step has left.
"""

from __future__ import annotations

from collections.abc import Mapping

from saccade.engine.device.rows import Asked
from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.engine.rows.states import follow_prefill
from saccade.engine.steps.step import CallCount, RequestResult, ScheduledRequest
from saccade.engine.watch.phase_stats import SLIDES, ran_dense
from saccade.errors import failure
from saccade.methods.base import Chunk, Cost, Method
from saccade.models.interface import ModelSpec
from saccade.selection import Band, Dense, Shape

EACH = 16  # tokens of a row
MOST_TOKENS = 128  # of a chunk; more of them keep a GPU busy by themselves
MOST_PIECES = 64  # rows of a step: the products of so many tokens keep a GPU busy
MOST_LEARNED = 16  # of one whose queries are kept in all layers for methods that learn from them


def why_not(one: ScheduledRequest, memory: SequenceMemory) -> str | None:
    """Why the rows of a prefill are left to the host; None where a recorded step serves them."""
    policy = one.policy
    if one.start == 0 or one.length > MOST_TOKENS:
        return f"only chunks of at most {MOST_TOKENS} rows that follow others are recorded"
    if policy.window is not None or policy.freeze is not None or not policy.prefill.reads_all(one.start, one.stop):
        return "only chunks that read everything are recorded"
    if one.scored:
        return "log-probabilities of its tokens are wanted"
    if policy.decode.calibration is not None:
        return "what its decode method was calibrated for lies with the host"
    if memory.evicts:
        return "an earlier turn evicted keys"
    if memory.kv.pool.absent or memory.kv.pool.tiers is not None:
        return "KV blocks are not resident, or may leave"
    return None


def pieces(one: ScheduledRequest) -> list[ScheduledRequest]:
    """The rows of a chunk, so many at a time as one row of a step has."""
    return [
        one._replace(start=at, stop=min(at + EACH, one.stop), wants_logits=one.wants_logits and at + EACH >= one.stop)
        for at in range(one.start, one.stop, EACH)
    ]


def parts(scheduled: Mapping[int, ScheduledRequest]) -> list[list[int]]:
    """The requests ``scheduled``, by number, in as many steps as they need; those that a method learns from in steps of
    their own."""
    found: list[list[int]] = []
    for most, learned in ((MOST_PIECES, False), (MOST_LEARNED, True)):
        room = 0
        for number, one in scheduled.items():
            if learns(one) != learned:
                continue
            size = len(pieces(one))
            if size > room:
                found.append([])
                room = most
            found[-1].append(number)
            room -= size
    return found


def learns(one: ScheduledRequest) -> bool:
    """Whether the decode method learns something from these rows."""
    method = one.policy.decode
    return method.watches or method.tail_rows > 0 or (one.ends_span and type(method).begin is not Method.begin)


def settle(
    one: ScheduledRequest,
    memory: SequenceMemory,
    result: RequestResult,
    spec: ModelSpec,
    asked: Asked | None,
    first: int,
) -> None:
    """What follows a step that has stored and attended the rows of ``one``: counting, and learning from the queries
    that it ``asked`` from token ``first`` on."""
    device = memory.kv.pool.storage.device
    shape = Shape.suffix(spec.heads, spec.kv_heads, one.length, one.stop, device)
    method = one.policy.prefill
    slides = [window is not None and window < one.stop for window in spec.windows]
    used = [
        Dense(shape) if window is None or not own else Band(shape, window) for window, own in zip(spec.windows, slides)
    ]
    if not method.means_dense:
        if any(slides):
            result.note(SLIDES)
        if not all(slides):
            result.note(ran_dense("prefill", method.name))
    if not learns(one):
        if one.start == one.span_start:
            memory.tails = [None] * spec.layers
        if one.ends_span:
            memory.states, memory.watched = [None] * spec.layers, [None] * spec.layers
        nothing = Cost()
        result.calls += [CallCount(layer, used[layer], nothing, "triton") for layer in range(spec.layers)]
        return
    assert asked is not None
    for layer in range(spec.layers):
        try:
            q = asked.q[layer, first : first + one.length].transpose(0, 1).contiguous()  # the next step writes there
            chunk = Chunk(
                q,
                memory.kv.view(layer),
                shape,
                asked.specs[layer].scale,
                asked.specs[layer].softcap,
                layer,
                spec.layers,
                past=memory.watched[layer],
                states=memory.states,
            )
            follow_prefill(one, memory, chunk, slides[layer])
        except Exception as error:  # the others' rows are stored as they are
            result.error, result.error_type = failure(error, f"layer {layer}, {one.phase}")
            return
        for note in chunk.cost.notes:
            result.note(note)
        result.calls.append(CallCount.of(layer, used[layer], chunk.cost, "triton"))
