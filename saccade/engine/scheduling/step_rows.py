"""The rows of a step as plain data: the next ones of each request, and the input that they make together."""

from __future__ import annotations

from array import array

import torch

from saccade.engine.request import Request
from saccade.engine.steps.row_sampling import RowSampling
from saccade.engine.steps.step import ScheduledRequest, StepInput


def next_rows(request: Request, chunk: int) -> ScheduledRequest:
    """The rows of ``request`` that come next, at most ``chunk``."""
    sequence = request.sequence
    rows = sequence.next_rows(chunk)
    assert rows is not None, "a request without rows to compute must have finished"
    start, stop, span = rows
    return ScheduledRequest(
        request.id,
        sequence.id,
        start,
        stop,
        span.phase,
        span.policy,
        span.start,
        span.stop,
        span.length,
        span.after_cut,
        wants_logits=stop == len(sequence.tokens),
        greedy=_greedy(request),
        sampling=_sampling(request, stop),
        scored=request.to_score(start, stop),
        top=request.params.prompt_logprobs or 0,
    )


def _greedy(request: Request) -> bool:
    """Whether the likeliest token is all that is wanted, by the samples that wait for this prompt too."""
    return request.sampler.takes_likeliest and all(fork.sampler.takes_likeliest for fork in request.forks)


def _sampling(request: Request, stop: int) -> RowSampling | None:
    """How the token after the row that ends at ``stop`` is to be chosen, where one is and it takes more than the
    likeliest. Samples that wait for this prompt each draw a token of their own from its logits."""
    tokens, sampler = request.sequence.tokens, request.sampler
    if sampler.takes_likeliest or stop != len(tokens) or request.forks:
        return None
    return sampler.row(tokens)


def step_input(batch: list[tuple[Request, ScheduledRequest]]) -> StepInput:
    """The scheduled rows as one step."""
    ids, positions, starts = array("q"), array("q"), [0]
    for request, rows in batch:
        start, stop = rows.start, rows.stop
        ids.extend(request.sequence.tokens[start:stop])
        ids.extend(rows.drafts)
        positions.extend(range(start, stop))
        starts.append(starts[-1] + stop - start)
    return StepInput(
        tuple([rows for _, rows in batch]),
        torch.frombuffer(ids, dtype=torch.int64),  # a tensor of a list looks at every element
        torch.frombuffer(positions, dtype=torch.int64),
        tuple(starts),
    )
