"""What a caller of generate and chat gets back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from saccade.engine.messages import RequestMetrics, RequestOutcome, TokenLogprob
from saccade.engine.stream import Stream


@dataclass
class CompletionOutput:
    """One sample. ``finish_reason``: ``stop`` (end token or stop string), ``length``, ``cancelled`` or ``error``.
    ``stop_reason``: the stop string or stop token that ended it, None for an end token of the model."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, TokenLogprob]] | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """All samples of one prompt, and ``report``: what the first of them really did, as plain data (see
    docs/report.md).

    ``prompt_logprobs``: one entry a token of ``prompt_token_ids`` if they were asked for (see SamplingParams).
    ``metrics``: when what happened. ``num_cached_tokens``: those before the answer that were computed earlier.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    report: dict[str, Any]
    reports: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    finished: bool = True
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
    request_id: str = ""
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


def finished(streams: Sequence[Stream], use_tqdm: bool | Callable[..., Any] = False) -> list[RequestOutcome]:
    """Wait until all requests ended; a warning for each that failed. ``use_tqdm``: a bar of requests on stderr, by tqdm
    or by what it is."""
    outcomes = []
    with _bar(use_tqdm, len(streams)) as advance:
        for stream in streams:
            outcome = None
            while outcome is None:
                outcome = stream.wait().outcome
            outcomes.append(outcome)
            advance()
    warn_of_failures(outcomes)
    return outcomes


@contextmanager
def _bar(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Callable[[], None]]:
    if not use_tqdm:
        yield lambda: None
        return
    import tqdm

    make: Any = tqdm.tqdm if use_tqdm is True else use_tqdm
    bar = make(total=total, desc="Processed prompts", unit="req")
    try:
        yield lambda: bar.update(1)
    finally:
        bar.close()


def warn_of_failures(outcomes: Iterable[RequestOutcome]) -> None:
    """A RuntimeWarning for each request that ended with an error."""
    for outcome in outcomes:
        if outcome.error is not None:
            warnings.warn(f"a request failed: {outcome.error}", RuntimeWarning, stacklevel=4)


def request_output(prompt: str | None, group: Sequence[RequestOutcome]) -> RequestOutput:
    """The samples of one prompt as one output."""
    outputs = [
        CompletionOutput(
            index, one.text, one.token_ids, one.finish_reason, one.cumulative_logprob, one.logprobs, one.stop_reason
        )
        for index, one in enumerate(group)
    ]
    reports = [one.report for one in group]
    error = next((one.error for one in group if one.error is not None), None)
    first = group[0]
    return RequestOutput(
        prompt,
        first.prompt,
        outputs,
        first.report,
        reports,
        error,
        prompt_logprobs=first.prompt_logprobs,
        request_id=str(first.request_id),
        metrics=first.metrics,
        num_cached_tokens=first.report["cached_tokens"],
    )
