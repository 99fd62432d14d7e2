"""What became of a step's requests over all ranks, so that each does the same with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from saccade.engine.ranks.meeting import Group
from saccade.engine.steps.step import CallCount, StepInput, StepResult
from saccade.methods.base import Cost


class Outcome(NamedTuple):
    """Of a request's rows. ``good``: no rank failed them; ``here``: this one did not; ``lost``: some rank cannot have
    keys back; ``calls``: how many all ranks have written down; ``uneven``: on some rank what ``uneven`` says."""

    good: bool
    here: bool
    lost: bool
    calls: int
    uneven: bool


def uneven(step: StepInput, result: StepResult, gone: Sequence[bool]) -> list[bool]:
    """Of each request of ``step``: whether earlier turns evicted keys of some heads (``gone``), so that not even dense
    rows read alike in all of them; or a draft learns from rows that verify, and chooses keys for it, which costs by
    head."""
    found = [result.requests[one.request_id].rows for one in step.scheduled]
    costs = [any(_has_cost(call) for row in rows for call in row.calls) for rows in found]
    return [evicted or cost for evicted, cost in zip(gone, costs, strict=True)]


def _has_cost(call: CallCount) -> bool:
    return call.coverage is not None or call.cost != Cost()


def outcomes(group: Group, step: StepInput, result: StepResult, unevenly: Sequence[bool]) -> list[Outcome]:
    """Of each request of ``step``; all ranks call it. ``unevenly``: what ``uneven`` says here.
    The one message over the host that each step needs: the first rank chooses tokens, and has blocks filled, by rows
    that must have come through on every rank."""
    own = []
    for one, differs in zip(step.scheduled, unevenly, strict=True):
        found = result.requests[one.request_id]
        own.append((found.is_good, not found.lost, len(found.calls), not differs))
    asked = torch.tensor(own, dtype=torch.int64, device="cpu")
    least = torch.stack(group.gather(asked)).amin(0).tolist()
    return [
        Outcome(bool(good), mine[0], not kept, calls, not even) for mine, (good, kept, calls, even) in zip(own, least)
    ]
