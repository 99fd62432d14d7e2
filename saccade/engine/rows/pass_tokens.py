"""Logits of a pass of packed rows: tokens are chosen on the device where that is possible; the logits of all other rows
are copied to the CPU for each request's sampler."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from saccade.engine.sampling.choosing import LEFT, choose_tokens, likeliest, whole
from saccade.engine.steps.step import RequestResult, ScheduledRequest, StepInput, StepResult, results_of

Row = tuple[int, RequestResult, ScheduledRequest]  # its place among the logits, its result, whose it is


def take_logits(step: StepInput, result: StepResult, logits: Tensor, there: bool) -> None:
    """Write down, from ``logits`` fp32 [rows whose logits are wanted, vocab] in the order of ``step``, each row's token
    or its logits. Waits for the device.

    ``there``: choose every token where the logits lie that can be, as on a GPU: to bring a row of 128K logits to the
    host and look for the greatest takes half a millisecond. Otherwise those of greedy rows alone.
    """
    rows: list[Row] = []
    alone: set[int] = set()  # places of rows whose request wants one token
    for one in step.scheduled:
        own = results_of(result.requests, one)[0]
        wanted = one.length if one.all_logits else int(one.wants_logits)
        if wanted == 1 and one.row is None and not one.together and own.error is None:
            alone.add(len(rows))
        rows += [(len(rows) + at, own.rows[at] if one.together else own, one) for at in range(wanted)]
    greedy = [row for row in rows if row[0] in alone and row[2].greedy]
    done = _take_likeliest(logits, greedy)
    if there:
        drawn = [row for row in rows if row[0] in alone and not row[2].greedy and row[2].sampling is not None]
        done |= _draw(logits, drawn)
    _leave(logits, [row for row in rows if row[0] not in done])


def _take_likeliest(logits: Tensor, rows: Sequence[Row]) -> set[int]:
    """Give ``rows`` their likeliest tokens; the places of those whose logits are sound."""
    if not rows:
        return set()
    tokens = likeliest(_of(logits, rows))
    return {_take(row, token) for row, token in zip(rows, tokens) if token != LEFT}


def _draw(logits: Tensor, rows: Sequence[Row]) -> set[int]:
    """Give ``rows`` the tokens that their samplers ask for; the places of those whose logits are sound."""
    asked = [one.sampling for _, _, one in rows if one.sampling is not None]
    if not rows:
        return set()
    tokens, entries = choose_tokens(_of(logits, rows), asked, [one.stop for _, _, one in rows])
    for (_, own, _), token, entry in zip(rows, tokens, entries):
        own.logprobs = [entry] if token != LEFT and entry is not None else None
    return {_take(row, token) for row, token in zip(rows, tokens) if token != LEFT}


def _take(row: Row, token: int) -> int:
    place, own, _ = row
    own.tokens = [token]
    return place


def _leave(logits: Tensor, rows: Sequence[Row]) -> None:
    """Bring the logits of ``rows`` to the CPU, those of a request in one piece."""
    if not rows:
        return
    here = _of(logits, rows).cpu()
    firsts: dict[int, int] = {}
    for at, (_, own, _) in enumerate(rows):
        first = firsts.setdefault(id(own), at)
        own.logits = here[first : at + 1]


def _of(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[whole([place for place, _, _ in rows], logits.device)]
