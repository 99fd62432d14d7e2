"""One pass of the layers over a step's packed rows, attended by the row backend."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.engine.rows.attention import RowAttention
from saccade.engine.rows.calls import RequestRows
from saccade.engine.rows.pass_tokens import take_logits
from saccade.engine.sampling.sampler import NOT_FINITE, row_logprobs
from saccade.engine.steps.paths import CHUNK, HOST, LAYER, ROW, STEP, TIER, Path
from saccade.engine.steps.step import ScheduledRequest, StepInput, StepResult
from saccade.engine.watch.observe import LogitsObserver
from saccade.kv.state_journal import Again
from saccade.models.interface import ScoredRows, Segment, StateRows
from saccade.models.runner import HFRunner


class LayersPass:
    """The pass of ``step``, planned (see engine.attention.PlannedStep): ``attention`` attends layer by layer, what rows
    did is written down in ``result``."""

    def __init__(
        self,
        runner: HFRunner,
        step: StepInput,
        result: StepResult,
        attention: RowAttention,
        looks: LogitsObserver | None,
    ) -> None:
        self.runner, self.step, self.result, self.attention = runner, step, result, attention
        self._looks = looks
        self._shown: list[tuple[int, int, int]] = []  # decode rows looked at: packed row, request, position

    @torch.inference_mode()
    def steps(self) -> Generator[int, None, None]:
        """See PlannedStep: models.runner.HFRunner.steps. Raises what a layer raises; nothing counts as stored then."""
        return self.runner.steps(
            self.step.input_ids, self.step.positions, self.attention.context, take=self._take, **self._asked()
        )

    def _take(self, logits: Tensor) -> None:
        """Choose tokens from ``logits`` fp32 [rows, vocab], those of rows that are looked at last."""
        wanted = len(logits) - len(self._shown)
        for (_, request, position), row in zip(self._shown, logits[wanted:]):
            assert self._looks is not None, "rows are shown to those who look"
            self._looks(request, position, row)
        take_logits(self.step, self.result, logits[:wanted], there=logits.is_cuda)
        for rows in self.attention.rows:
            rows.result.path = path_of(rows, self.attention)

    def _asked(self) -> dict[str, Any]:
        """What the pass asks of the runner."""
        segments: list[Segment] = []
        wanted: list[int] = []  # packed rows whose logits choose tokens
        scored: list[tuple[int, int, int, ScheduledRequest]] = []
        for one, first in zip(self.step.scheduled, self.step.query_start_loc):
            segments.append(Segment(first, one.length, one.rope_length))
            scored += [(first + row - one.start, row + 1, token, one) for row, token in one.scored]
            if one.all_logits:
                wanted += range(first, first + one.length)
            elif one.wants_logits:
                wanted.append(first + one.length - 1)
            if self._looks is not None and one.phase == "decode":
                self._shown += [(first + at, one.request_id, one.start + at) for at in range(one.length)]
        rows = np.array([*wanted, *(row for row, _, _ in self._shown)], dtype=np.int64)
        return {
            "segments": segments,
            "logit_rows": torch.from_numpy(rows),  # torch looks at every number of a list by itself
            "scored": _prompt_scores(scored, self.result) if scored else None,
            "frozen": self.attention.frozen,
            "ahead": self.attention.ahead_rows(),
            "inputs": self.attention.input_rows(),
            "parts": self.attention.parts(),
            "whole": self.attention.whole(),
            **({} if (states := state_rows(self.attention.rows)) is None else {"states": states}),
        }


def _prompt_scores(scored: list[tuple[int, int, int, ScheduledRequest]], result: StepResult) -> ScoredRows:
    """``scored``: (packed row, place of the token that it predicts, that token, its request)."""

    def visit(first: int, logits: Tensor) -> None:
        part = scored[first : first + len(logits)]
        finite = logits.amax(-1).isfinite().tolist()
        for top in sorted({one.top for _, _, _, one in part}):  # by themselves: the rank of equals depends on it
            which = [at for at, (_, _, _, one) in enumerate(part) if one.top == top]
            own = logits if len(which) == len(part) else logits[which]
            for at, entries in zip(which, row_logprobs(own, [part[at][2] for at in which], top)):
                _, place, _, one = part[at]
                if not finite[at]:
                    result.requests[one.request_id].error = f"scoring the prompt: {NOT_FINITE}"
                result.requests[one.request_id].prompt_scores[place] = entries

    return ScoredRows(torch.tensor([row for row, _, _, _ in scored]), visit)


def path_of(rows: RequestRows, attention: RowAttention) -> Path:
    """The path that ``rows`` of a pass have taken, once it has run."""
    joined, passed_on = attention.joined, rows.result.passed_on
    if attention.is_hosted(rows):
        return Path(HOST)
    if rows.scheduled.request_id in attention.resolved:
        return Path(TIER, passed_on)
    if not (rows.decodes or rows.together):
        return Path(CHUNK, passed_on)
    if joined is None or id(rows) not in attention.together:
        return Path(ROW, passed_on or attention.why_apart)
    if (why := joined.why_chosen.get(id(rows))) is not None:
        return Path(ROW, passed_on or why)
    return Path(STEP, passed_on) if joined.ran_whole else Path(LAYER, passed_on or attention.why_not_whole())


def state_rows(requests: Sequence[RequestRows]) -> StateRows | None:
    """Where layers find the states of the sequences of these rows; None where no layer keeps any."""
    if not requests or requests[0].memory.kept is None:
        return None
    slots: list[int] = []
    spans: list[tuple[int, int]] = []
    inner: dict[int, tuple[int, int]] = {}
    journals: dict[int, list[Again]] = {}
    for memory, own in groupby(requests, lambda one: one.memory):  # drafted rows come behind each other
        kept, rows = memory.kept, list(own)
        assert kept is not None, "a model's sequences are alike"
        assert kept.slot is not None, "the step has begun"
        number, count = len(slots), sum(one.scheduled.length for one in rows)
        slots.append(kept.slot)
        spans.append((rows[0].first, count))
        if kept.inner is not None:
            inner[number] = kept.inner[0] - rows[0].scheduled.start, kept.inner[1]
        if kept.journal is not None:
            journals[number] = kept.journal.begin(count)
    return StateRows(requests[0].memory.kept.pool.tensors, slots, spans, inner, journals)
