"""What a caller of generate and chat gets back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.engine.loop import AsyncEngine
from saccade.engine.messages import RequestOutcome, TokenLogprob
from saccade.engine.stream import Stream


@dataclass
class CompletionOutput:
    """One sample. ``finish_reason``: ``stop`` (end token or stop string), ``length``, ``cancelled`` or ``error``."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, TokenLogprob]] | None = None


@dataclass
class RequestOutput:
    """All samples of one prompt, and ``report``: what the first of them really did, as plain data (see
    docs/report.md).

    ``prompt_logprobs``: one entry a token of ``prompt_token_ids`` if they were asked for (see SamplingParams).
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    report: dict[str, Any]
    reports: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    finished: bool = True
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None


def finished(loop: AsyncEngine, streams: Sequence[Stream]) -> list[RequestOutcome]:
    """Wait until all requests ended; a warning for each that failed. An interrupt cancels them."""
    outcomes = []
    try:
        for stream in streams:
            outcome = None
            while outcome is None:
                outcome = stream.wait().outcome
            outcomes.append(outcome)
    except BaseException:
        loop.cancel([stream.request_id for stream in streams])
        raise
    warn_of_failures(outcomes)
    return outcomes


def warn_of_failures(outcomes: Iterable[RequestOutcome]) -> None:
    """A RuntimeWarning for each request that ended with an error."""
    for outcome in outcomes:
        if outcome.error is not None:
            warnings.warn(f"a request failed: {outcome.error}", RuntimeWarning, stacklevel=4)


def request_output(prompt: str | None, group: Sequence[RequestOutcome]) -> RequestOutput:
    """The samples of one prompt as one output."""
    outputs = [
        CompletionOutput(index, one.text, one.token_ids, one.finish_reason, one.cumulative_logprob, one.logprobs)
        for index, one in enumerate(group)
    ]
    reports = [one.report for one in group]
    error = next((one.error for one in group if one.error is not None), None)
    first = group[0]
    return RequestOutput(
        prompt, first.prompt, outputs, first.report, reports, error, prompt_logprobs=first.prompt_logprobs
    )
