"""Choosing the tokens of many rows at once, where their logits lie: what
:class:`~saccade.engine.sampling.sampler.Sampler` does for one row, in the same order, without bringing a vocabulary of
logits to the host for each.

What stays with the row's own sampler: answers under a constraint, whose matcher sees the tokens one by one, and logits
that are not finite, of which it says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.engine.sampling.sampler import row_logprobs
from saccade.engine.steps.row_sampling import RowSampling
from saccade.engine.steps.step import LogprobEntries
from saccade.machine import sent
from saccade.randomness import uniform

LEFT = -1  # in place of a token: the row's own sampler is to say what is wrong


def likeliest(logits: Tensor) -> list[int]:
    """The likeliest token of each row fp32 [rows, vocab], the lowest of equals. ``LEFT`` where the greatest logit is no
    finite number. Waits for the device."""
    if logits.is_cpu:  # numpy's search takes a tenth of torch's time over a vocabulary of 128K
        rows = logits.numpy()
        best: list[int] = rows.argmax(-1).tolist()  # of a row with NaN, where it is
        return [token if math.isfinite(rows.item(row, token)) else LEFT for row, token in enumerate(best)]
    found: list[int] = torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), LEFT).tolist()
    return found


def choose_tokens(
    logits: Tensor, asked: Sequence[RowSampling], places: Sequence[int]
) -> tuple[list[int], list[LogprobEntries | None]]:
    """The tokens of rows ``logits`` fp32 [rows, vocab], each at its place of its sequence, and what each row wants to
    know of its log-probabilities. ``LEFT`` where the logits, or what became of them, have no finite maximum.

    A row's token does not depend on the rows beside it.
    """
    chosen = chosen_there(logits, asked, places).tolist()
    return chosen, entries_of(logits, asked, chosen)


def chosen_there(logits: Tensor, asked: Sequence[RowSampling], places: Sequence[int]) -> Tensor:
    """The tokens alone, where the logits lie: int64 [rows]. Nothing waits for the device."""
    scores = _steered(logits, asked)
    tokens, greatest = scores.argmax(-1), scores.amax(-1)
    drawn = [row for row, one in enumerate(asked) if one.temperature > 0]
    if drawn:
        # A lone row would be scanned by another kernel, which adds up in another order: it goes twice.
        rows = drawn if len(drawn) > 1 else drawn * 2
        at = whole(rows, logits.device)
        theirs = [asked[row] for row in rows]
        warped = _warped(scores[at], theirs)
        tokens[at], greatest[at] = _draw(warped, theirs, [places[row] for row in rows]), warped.amax(-1)
    sound = logits.amax(-1).isfinite() & greatest.isfinite()
    return torch.where(sound, tokens, LEFT)


def whole(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on ``device``, without a wait for what runs there."""
    return _over(torch.tensor(values, dtype=torch.long), device)


def _over(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``values`` on ``device``, without a wait for what runs there."""
    held = values if dtype is None else values.to(dtype)
    return sent(held, device)


def _column(asked: Sequence[RowSampling], name: str, like: Tensor) -> Tensor:
    """One number of each row, of the dtype and on the device of ``like``: [rows]."""
    values = torch.tensor([getattr(one, name) for one in asked], dtype=torch.float64)
    return _over(values, like.device, like.dtype)


def _places(lists: Sequence[Tensor | None], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Where each row's list of tokens points: rows and tokens, both int64 [n]; None if no row has any."""
    lengths = [0 if one is None else len(one) for one in lists]
    if not any(lengths):
        return None
    rows = torch.repeat_interleave(torch.arange(len(lists)), torch.tensor(lengths))
    return _over(rows, device), _over(torch.cat([one for one in lists if one is not None]), device)


def _steered(logits: Tensor, asked: Sequence[RowSampling]) -> Tensor:
    """Bans, biases and penalties, in :class:`Sampler`'s order."""
    scores, device = logits.clone(), logits.device
    if at := _places([torch.tensor(one.banned, dtype=torch.long) if one.banned else None for one in asked], device):
        scores[at] = -torch.inf
    biases = [one.biases for one in asked]
    if at := _places([None if one is None else one[0] for one in biases], device):
        scores[at] += _over(torch.cat([one[1] for one in biases if one is not None]), device)
    if at := _places([one.seen for one in asked], device):
        penalties, old = _column(asked, "repetition_penalty", scores)[at[0]], scores[at]
        scores[at] = torch.where(old < 0, old * penalties, old / penalties)
    answers = [one.answer for one in asked]
    if at := _places([None if one is None else one[0] for one in answers], device):
        counts = _over(torch.cat([one[1] for one in answers if one is not None]), device)
        lower = _column(asked, "frequency_penalty", scores)[at[0]] * counts
        scores[at] = scores[at] - lower - _column(asked, "presence_penalty", scores)[at[0]]
    return scores


def _warped(scores: Tensor, asked: Sequence[RowSampling]) -> Tensor:
    """Temperature, top-k, top-p and min-p in transformers' order and by its rules: equal logits stay together at the
    border of top-k, and each rule sees what the one before it has left."""
    scores = scores / _column(asked, "temperature", scores)[:, None]
    vocab = scores.shape[-1]
    ranks = [min(one.top_k or vocab, vocab) for one in asked]
    if min(ranks) < vocab:
        most = max(rank for rank in ranks if rank < vocab)
        best = torch.topk(scores, most).values
        last = best.gather(-1, whole([min(rank, most) - 1 for rank in ranks], scores.device)[:, None])
        limited = whole([rank < vocab for rank in ranks], scores.device).bool()[:, None]
        scores = scores.masked_fill(limited & (scores < last), -torch.inf)
    if any(one.top_p < 1.0 for one in asked):
        rising, order = torch.sort(scores, stable=True)  # equals leave in the order of their ids, as of any sampler's
        # `1 - top_p` is rounded once, as the number that transformers compares with.
        rest = torch.tensor([1 - one.top_p for one in asked], dtype=torch.float64)
        rest = _over(rest, scores.device, scores.dtype)[:, None]
        gone = rising.softmax(-1).cumsum(-1) <= rest
        gone[:, -1] = False
        gone &= whole([one.top_p < 1.0 for one in asked], scores.device).bool()[:, None]
        scores = scores.masked_fill(gone.scatter(-1, order, gone), -torch.inf)
    if any(one.min_p > 0.0 for one in asked):
        weights = scores.softmax(-1)
        least = _column(asked, "min_p", scores)[:, None] * weights.amax(-1, keepdim=True)
        scores = scores.masked_fill(weights < least, -torch.inf)
    return scores


def _draw(scores: Tensor, asked: Sequence[RowSampling], places: Sequence[int]) -> Tensor:
    """One token of each row by its own draw: int64 [rows]."""
    device = scores.device
    draws = uniform(
        whole([one.seed for one in asked], device),
        whole([one.sample for one in asked], device),
        whole(places, device),
    )
    cumulative = torch.softmax(scores.double(), -1).cumsum(-1)
    wanted = draws[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def entries_of(logits: Tensor, asked: Sequence[RowSampling], chosen: Sequence[int]) -> list[LogprobEntries | None]:
    """Log-probabilities of the rows that want some."""
    found: list[LogprobEntries | None] = [None] * len(asked)
    by_count: dict[int, list[int]] = {}
    for row, one in enumerate(asked):
        if one.logprobs is not None and chosen[row] != LEFT:
            by_count.setdefault(one.logprobs, []).append(row)
    for count, rows in by_count.items():  # by themselves: the rank of equals depends on how many are asked for
        entries = row_logprobs(logits[whole(rows, logits.device)], [chosen[row] for row in rows], count)
        for row, every in zip(rows, entries):
            found[row] = every
    return found
