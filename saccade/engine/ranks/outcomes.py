"""What became of a step's requests over all ranks, so that each does the same with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from saccade.engine.ranks.meeting import Group
from saccade.engine.steps.step import StepInput, StepResult


class Outcome(NamedTuple):
    """Of a request's rows. ``good``: no rank failed them; ``here``: this one did not; ``lost``: some rank cannot have
    keys back; ``calls``: how many all ranks have written down; ``gone``: earlier turns evicted keys of some heads, so
    not even dense rows read alike in all of them."""

    good: bool
    here: bool
    lost: bool
    calls: int
    gone: bool


def outcomes(group: Group, step: StepInput, result: StepResult, gone: Sequence[bool]) -> list[Outcome]:
    """Of each request of ``step``; all ranks call it. ``gone``: whether earlier turns evicted keys of each here.
    The one message over the host that each step needs: the first rank chooses tokens, and has blocks filled, by rows
    that must have come through on every rank."""
    own = []
    for one, evicted in zip(step.scheduled, gone, strict=True):
        found = result.requests[one.request_id]
        own.append((found.is_good, not found.lost, len(found.calls), not evicted))
    asked = torch.tensor(own, dtype=torch.int64, device="cpu")
    least = torch.stack(group.gather(asked)).amin(0).tolist()
    return [
        Outcome(bool(good), mine[0], not kept, calls, not whole) for mine, (good, kept, calls, whole) in zip(own, least)
    ]
