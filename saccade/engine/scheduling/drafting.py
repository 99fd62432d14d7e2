"""Speculation: the next tokens of a request are guessed, and one step computes the rows of all guesses.

The step's rows are settled one after the other, as if none were drafted: the request's own sampler chooses a token from
each row's logits, and the row after it counts if its token was guessed right. A draw hangs on the token's place alone
(``randomness``), so sampled answers are the same too. What rejected rows left, keys and states, is taken back, and they
enter no count. A guess therefore changes when tokens come, never which.

Drafts take what is left: they displace no other row of the step, and neither preempt nor drop anything for blocks.
"""

from __future__ import annotations

import logging

from saccade.engine.request import Request
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.engine.steps.step import ScheduledRequest

logger = logging.getLogger(__name__)


def room(request: Request, rows: ScheduledRequest, scheduler: Scheduler, most: int) -> int:
    """How many tokens may be drafted, at most ``most``: those that the answer and the free blocks have room for."""
    if rows.phase != "decode" or not rows.wants_logits or has_one_row(request) or not _can_go_back(request, scheduler):
        return 0
    sequence = request.sequence
    free = min(most, request.output_start + request.max_tokens - len(sequence.tokens) - 1)
    while free > 0 and sequence.kv.missing_blocks(rows.stop + free) > scheduler.pool.free_blocks:
        free -= 1
    return free


def _can_go_back(request: Request, scheduler: Scheduler) -> bool:
    """Whether there is room for what layers that keep a state go back to: a second one for each request that runs."""
    states = scheduler.pool.states
    if states is None or states.slots > 2 * len(scheduler.running):
        return True
    request.report.note(
        f"nothing was drafted beside so many requests: {states.slots} states of the model's layers leave no room to go "
        "back to; raise kv_memory"
    )
    return False


def reserved(request: Request, stop: int) -> bool:
    """Whether there are blocks for drafted rows before ``stop``, from now on; else the step goes without them."""
    try:
        request.sequence.kv.reserve(stop)
    except Exception:
        logger.debug("no blocks for drafts", exc_info=True)
        return False
    return True


def has_one_row(request: Request) -> bool:
    """Whether the request decodes one row at a time. All methods of this package can do several, as their states can be
    copied and so taken back; what cannot: a method with a state of another make, a request of which a step with drafts
    broke (perhaps for its many rows), and one whose samples are about to go on from where it stands."""
    if request.undrafted or request.forks:
        return True
    if request.sequence.memories.can_copy(request.sequence.id):
        return False
    request.report.note(
        f"decode: '{request.policy.decode.text}' keeps a state that cannot be taken back, so nothing is drafted"
    )
    return True
