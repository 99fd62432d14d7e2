"""Speculation: a drafter guesses the next tokens of a request, and one step computes the rows of all guesses.

The step's rows are settled one after the other, as if none were drafted: the request's own sampler chooses a token from
each row's logits, and the row after it counts if its token was guessed right. A draw hangs on the token's place alone
(``randomness``), so sampled answers are the same too. What rejected rows left, keys and states, is taken back, and they
enter no count. A guess therefore changes when tokens come, never which.

Drafts take what is left: they displace no other row of the step, and neither preempt nor drop anything for blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import index
from typing import Protocol

from saccade.engine.request import Request
from saccade.engine.scheduler import Scheduler
from saccade.engine.step import ScheduledRequest

logger = logging.getLogger(__name__)
MOST = 16  # drafted tokens of a request in one step


class Drafter(Protocol):
    """Guesses what comes next. It runs on the engine's thread, between two steps."""

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow ``tokens``, a whole sequence, not to be changed; none without a guess.
        What lies beyond ``most`` is ignored, and so is all from the first token on that is not in the vocabulary: no
        sampler chooses it. If this raises, the step goes without drafts. The report says so in the last two cases."""
        ...


def with_drafts(
    batch: list[tuple[Request, ScheduledRequest]], drafter: Drafter, scheduler: Scheduler, vocab_size: int
) -> list[tuple[Request, ScheduledRequest]]:
    """``batch`` as scheduled, with the drafts of requests that are to choose a token after a decode row. Their blocks
    are reserved."""
    spare = scheduler.max_batch_rows - sum([rows.length for _, rows in batch])
    drafted = []
    for request, rows in batch:
        free = room(request, rows, scheduler, min(spare, MOST))
        if free > 0:
            drafts = _guesses(request, drafter, free, vocab_size)
            if drafts and reserved(request, rows.stop + len(drafts)):
                spare -= len(drafts)
                rows = rows._replace(stop=rows.stop + len(drafts), all_logits=True, drafts=drafts)
        drafted.append((request, rows))
    return drafted


def room(request: Request, rows: ScheduledRequest, scheduler: Scheduler, most: int) -> int:
    """How many tokens may be drafted, at most ``most``: those that the answer and the free blocks have room for."""
    if rows.phase != "decode" or not rows.wants_logits or has_one_row(request):
        return 0
    sequence = request.sequence
    free = min(most, request.output_start + request.max_tokens - len(sequence.tokens) - 1)
    while free > 0 and sequence.kv.missing_blocks(rows.stop + free) > scheduler.pool.free_blocks:
        free -= 1
    return free


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


def _guesses(request: Request, drafter: Drafter, most: int, vocab_size: int) -> tuple[int, ...]:
    """What ``drafter`` guesses, as far as it is of use."""
    try:
        drafts = [index(token) for token in drafter.draft(request.sequence.tokens, most)[:most]]
    except Exception as error:
        logger.debug("drafting failed", exc_info=True)
        request.report.note(f"drafts: the drafter failed: {type(error).__name__}: {error}")
        return ()
    for place, token in enumerate(drafts):
        if not 0 <= token < vocab_size:
            request.report.note(
                f"drafts: token id {token} is not an integer from 0 to {vocab_size - 1}; it and those after it were "
                "ignored"
            )
            return tuple(drafts[:place])
    return tuple(drafts)
