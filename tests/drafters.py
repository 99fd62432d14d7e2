"""Drafters for tests, which know the answers, and the means to compare runs with and without them to the last bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from helpers import UNTIMED
from torch import Tensor

from saccade import LLM
from saccade.engine.scheduling.drafting import reserved, room
from saccade.methods.base import Method
from saccade.methods.state import MethodState
from saccade.models.llama import LlamaDecoder
from saccade.models.llama_kernels import KernelSet
from saccade.selection import Dense

MOST = 16  # drafted tokens of a request in one step


@dataclass
class Perfect:
    """Goes on as one of the sequences that it ``knows``. ``asked``: the room that it was given, each time."""

    knows: list[list[int]]
    asked: list[int] = field(default_factory=list)

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        self.asked.append(most)
        here = len(tokens)
        for known in self.knows:
            if known[:here] == tokens:
                return self.guess(known[here:], here, most)
        return []

    def guess(self, right: list[int], here: int, most: int) -> list[int]:
        return right[:most]


class Wrong(Perfect):
    """Never right."""

    def guess(self, right: list[int], here: int, most: int) -> list[int]:
        return [other(token) for token in right[:most]]


class Erring(Perfect):
    """Right but for every third token or so."""

    def guess(self, right: list[int], here: int, most: int) -> list[int]:
        rng = random.Random(here)
        return [other(token) if rng.random() < 0.35 else token for token in right[:most]]


class Seldom(Erring):
    """Every third step or so, and then as above."""

    def guess(self, right: list[int], here: int, most: int) -> list[int]:
        return super().guess(right, here, most) if random.Random(here + 10_000).random() < 0.35 else []


class Overlong(Perfect):
    """Right, and more than it was asked for."""

    def guess(self, right: list[int], here: int, most: int) -> list[int]:
        return right[:most] + [5] * 40


def other(token: int) -> int:
    return (token + 1) % 256


def draft_by(engine: Any, drafter: Any) -> None:
    """``engine`` adds what ``drafter`` guesses to its steps; nothing for None."""
    own, ahead = engine.sparse_drafts, engine.scheduler
    for one, name in ((own, "added"), (ahead, "goes_on")):
        vars(one).pop(name, None)
    if drafter is not None:
        added = own.added
        own.added = lambda batch: added(with_drafts(batch, drafter, engine.scheduler))
        ahead.goes_on = lambda batch: False


def with_drafts(batch: list[Any], drafter: Any, scheduler: Any) -> list[Any]:
    """``batch`` as scheduled, with the drafts of requests that are to choose a token after a decode row. Their blocks
    are reserved."""
    spare = scheduler.max_batch_rows - sum(rows.length for _, rows in batch)
    drafted = []
    for request, rows in batch:
        free = room(request, rows, scheduler, min(spare, MOST))
        if free > 0:
            drafts = tuple(drafter.draft(request.sequence.tokens, free)[:free])
            if drafts and reserved(request, rows.stop + len(drafts)):
                spare -= len(drafts)
                rows = rows._replace(stop=rows.stop + len(drafts), all_logits=True, drafts=drafts)
        drafted.append((request, rows))
    return drafted


@contextmanager
def drafting(llm: LLM, drafter: Any):
    """``llm`` with a drafter."""
    draft_by(llm.engine, drafter)
    try:
        yield drafter
    finally:
        draft_by(llm.engine, None)


def counted(report: dict[str, Any]) -> dict[str, Any]:
    """What a report counts, times and drafts aside."""
    phases = {
        name: {key: value for key, value in report[name].items() if key not in UNTIMED}
        for name in ("prefill", "decode")
    }
    left_out = (
        "queue_seconds",
        "first_token_seconds",
        "total_seconds",
        "longest_gap_seconds",
        "drafted_tokens",
        "accepted_tokens",
    )
    return {key: value for key, value in report.items() if key not in left_out} | phases


@dataclass
class Seen(MethodState):
    rows: int = 0


@dataclass(frozen=True)
class Counting(Method):
    """Reads everything, and its state counts the rows that it has observed."""

    name: ClassVar[str] = "counting"
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def begin(self, segment):
        return Seen()

    def select_decode(self, query, state):
        assert state.rows == query.step
        return Dense(query.shape)

    def observe(self, query, selection, weights, state):
        state.rows += 1


class _RowByRow:
    """A layer whose products see one row at a time (models.llama_kernels.LayerKernels)."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, delta: Tensor | None = None):
        parts = [
            self.layer.project(hidden[row], cos[row], sin[row], None if delta is None else delta[row])
            for row in _each(hidden)
        ]
        return tuple(torch.cat(part, 1) for part in zip(*parts))

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor | None:
        deltas = [self.layer.finish(hidden[row], attended[:, row]) for row in _each(hidden)]
        return None if deltas[0] is None else torch.cat(deltas)


def _each(hidden: Tensor) -> list[slice]:
    return [slice(row, row + 1) for row in range(len(hidden))]


def row_by_row(llama: LlamaDecoder) -> None:
    """Have the products of a pass of few rows round as those of one row do, so that packed rows can be compared with
    single ones to the last bit."""
    kernels = llama.kernels

    def chosen(rows: int) -> KernelSet:
        if not 1 < rows <= 20:
            return kernels(rows)
        single = kernels(1)

        def logits(hidden: Tensor, delta: Tensor | None) -> Tensor:
            return torch.cat(
                [single.logits(hidden[row], None if delta is None else delta[row]) for row in _each(hidden)]
            )

        return KernelSet([_RowByRow(layer) for layer in single.layers], logits)

    llama.kernels = chosen  # type: ignore[method-assign]
