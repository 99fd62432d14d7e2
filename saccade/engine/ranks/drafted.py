"""Counts of drafted rows, which are verified one by one, over several ranks.

Which of them stay, and are counted, is known to the first rank once it has chosen their tokens. So each row's calls are
widened to all heads before: a row that verifies reads everything, alike in all heads, unless an earlier turn evicted
keys by head, and costs nothing beside, unless a draft learns from it. Then ranks exchange what these calls read and
cost, in the step: keeping them would take a message of its own to say which are to be counted. Only processes without
GPUs verify rows (rank_limits.py), so no device is waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.ranks.counts import exchange
from saccade.engine.ranks.meeting import Group
from saccade.engine.ranks.outcomes import Outcome
from saccade.engine.steps.step import CallCount, ReadPairs, RequestResult, StepInput, StepResult
from saccade.methods.base import Cost
from saccade.ops.pairs import pairs as pairs_of
from saccade.selection import Band, Dense, Selection, Shape
from saccade.selection.head_part import HeadPart


def share_rows(
    group: Group, step: StepInput, result: StepResult, outcomes: Sequence[Outcome]
) -> list[list[list[_Told]]]:
    """By rank, what it did in each call of each row that may read or cost unlike in its heads. Nothing is sent where
    none does; each rank calls it for the same ones."""
    rows = [row for row, uneven in _rows(step, result, outcomes) if uneven]
    return exchange(group, [[_told(call) for call in row.calls] for row in rows]) if rows else []


def join_rows(
    part: HeadPart, step: StepInput, result: StepResult, outcomes: Sequence[Outcome], told: list[list[list[_Told]]]
) -> None:
    """Let the calls of rows count the heads of all ranks, as they were ``told``; ``part`` says which heads these
    have."""
    number = 0
    for row, uneven in _rows(step, result, outcomes):
        for at, call in enumerate(row.calls):
            if uneven:
                row.calls[at] = _joined(call, [rank[number][at] for rank in told], part.at(call.layer))
            else:
                row.calls[at] = replace(call, used=_widened(call.used, part.parts))
        number += uneven


def _rows(step: StepInput, result: StepResult, outcomes: Sequence[Outcome]) -> list[tuple[RequestResult, bool]]:
    """Where the calls of good requests' rows are written down, and whether their heads may read or cost unlike."""
    good = [(result.requests[one.request_id], at.uneven) for one, at in zip(step.scheduled, outcomes) if at.good]
    return [(row, uneven) for request, uneven in good for row in request.rows]


class _Told(NamedTuple):
    """A rank's part of a call: ``pairs`` int64 [its heads]."""

    pairs: Tensor
    cost: Cost
    coverage: Tensor | None


def _told(call: CallCount) -> _Told:
    heads = call.used.shape.heads
    read = call.used.pairs if isinstance(call.used, ReadPairs) else pairs_of(call.used)
    return _Told(read.cpu().expand(heads).clone(), call.cost, None if call.coverage is None else call.coverage.cpu())


def _joined(call: CallCount, parts: Sequence[_Told], heads: HeadPart) -> CallCount:
    costs, kind = [part.cost for part in parts], call.used.kind if isinstance(call.used, ReadPairs) else type(call.used)
    searches = [cost.searches for cost in costs if cost.searches is not None]
    cost = Cost(
        scored=round(sum(one.scored for one in costs) / len(costs)),  # of each head
        estimated=round(sum(one.estimated for one in costs) / len(costs)),
        searches=sum(searches) if searches else None,
        notes=list(dict.fromkeys(note for one in costs for note in one.notes)),
        certified=dict(sum((Counter(one.certified) for one in costs), Counter())),
        rounding=max((one.rounding for one in costs if one.rounding is not None), default=None),
    )
    coverage = [part.coverage for part in parts if part.coverage is not None]
    shape = _wide(call.used.shape, len(parts))
    used = ReadPairs(shape, heads.join([part.pairs for part in parts]), kind)
    return replace(call, used=used, cost=cost, coverage=torch.cat(coverage) if coverage else None)


def _wide(shape: Shape, ranks: int) -> Shape:
    return replace(shape, heads=shape.heads * ranks, kv_heads=shape.kv_heads * ranks)


def _widened(used: Selection | ReadPairs, ranks: int) -> Selection | ReadPairs:
    """What reads alike in all heads, of the heads of all ranks."""
    shape = _wide(used.shape, ranks)
    if isinstance(used, Dense | Band):
        return replace(used, shape=shape)
    kind, read = (used.kind, used.pairs) if isinstance(used, ReadPairs) else (type(used), pairs_of(used))
    return ReadPairs(shape, read[:1], kind)
