"""Choosing the tokens of many rows at once, where their logits lie: what :class:`~saccade.engine.sampler.Sampler` does
for one row, in the same order, without bringing a vocabulary of logits to the host for each.

What stays with the row's own sampler: answers under a constraint, whose matcher sees the tokens one by one, and logits
that are not finite, of which it says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.engine.device_graphs import StepKind
from saccade.engine.device_watch import PlacedRow
from saccade.engine.row_sampling import RowSampling
from saccade.engine.sampler import NOT_FINITE, row_logprobs
from saccade.engine.step import LogprobEntries, RequestResult
from saccade.machine import sent
from saccade.randomness import uniform

LEFT = -1  # in place of a token: the row's own sampler is to say what is wrong


@torch.inference_mode()
def fetch_tokens(
    kind: StepKind, placed: Sequence[PlacedRow | None], meanwhile: Callable[[], None] | None = None
) -> None:
    """Write down the token of each row that wants one, or its logits [1, vocab] on the CPU; of rows that verify drafts
    the token of each of theirs. Waits for the step; ``meanwhile`` runs before that, and launches what comes behind."""
    likeliest = _fetched(kind.best, meanwhile)
    each = len(likeliest) // len(placed)
    if each > 1:
        _fetch_verified(kind, placed, likeliest, each)
        return
    sampled: list[tuple[int, PlacedRow, RowSampling]] = []
    left: list[tuple[int, PlacedRow]] = []
    for number, row in enumerate(placed):
        if row is None or row.result.error is not None:
            continue
        if not (row.scheduled.wants_logits or row.scheduled.all_logits):
            continue
        sound = likeliest[number] >= 0
        if sound and row.scheduled.greedy:
            row.result.tokens = [likeliest[number]]
        elif sound and row.scheduled.sampling is not None:
            sampled.append((number, row, row.scheduled.sampling))
        else:
            left.append((number, row))
    if sampled:
        logits = kind.logits[_whole([number for number, _, _ in sampled], kind.logits.device)]
        places = [row.scheduled.stop for _, row, _ in sampled]
        tokens, logprobs = choose_tokens(logits, [asked for _, _, asked in sampled], places)
        for (number, row, _), token, entries in zip(sampled, tokens, logprobs):
            if token == LEFT:
                left.append((number, row))
                continue
            row.result.tokens, row.result.logprobs = [token], None if entries is None else [entries]
    if left:
        logits = kind.logits[_whole([number for number, _ in left], kind.logits.device)].cpu()
        for at, (_, row) in enumerate(left):
            row.result.logits = logits[at : at + 1]


def _fetched(tokens: Tensor, meanwhile: Callable[[], None] | None) -> list[int]:
    """``tokens`` on the host, without a wait for what ``meanwhile`` launches."""
    if meanwhile is None:
        return tokens.tolist()
    held = tokens.to("cpu", non_blocking=True)
    if not tokens.is_cuda:
        meanwhile()
        return held.tolist()
    there = torch.cuda.Event()
    there.record()
    meanwhile()
    there.synchronize()
    return held.tolist()


def fetch_repeated(chosen: Sequence[Tensor], placed: Sequence[PlacedRow | None]) -> None:
    """Write down each row's tokens of a step that ran several times, ``chosen`` int64 [rows] each time, up to the first
    for which logits were not finite. Waits for the step."""
    turns = torch.stack(list(chosen)).tolist()
    for number, row in enumerate(placed):
        if row is None or row.result.error is not None:
            continue
        tokens = [turn[number] for turn in turns]
        row.result.tokens = tokens[: tokens.index(LEFT)] if LEFT in tokens else tokens
        if not row.result.tokens:
            row.result.error = NOT_FINITE


class Choice:
    """The tokens of a step's rows, chosen and left on the device: ``tokens`` int64 [rows]. Nothing waits for the step,
    and the next one may write over its logits."""

    def __init__(self, kind: StepKind, placed: Sequence[PlacedRow | None]) -> None:
        self.tokens, self._placed = kind.best, placed
        self._drawn: dict[int, RowSampling] = {}
        for number, row in enumerate(placed):
            if row is None or row.result.error is not None or row.scheduled.greedy:
                continue
            if row.scheduled.sampling is not None:
                self._drawn[number] = row.scheduled.sampling
        if self._drawn:
            at = _whole(list(self._drawn), kind.logits.device)
            self._logits = kind.logits[at]
            places = [row.scheduled.stop for number, row in enumerate(placed) if row and number in self._drawn]
            chosen = _chosen(self._logits, list(self._drawn.values()), places)
            self.tokens = kind.best.clone()
            self.tokens[at] = torch.where(self.tokens[at] < 0, LEFT, chosen)

    def write(self, tokens: Sequence[int], vocab_size: int) -> None:
        """Write down each row's token, which is here now."""
        drawn = [tokens[number] for number in self._drawn]
        entries = dict(zip(self._drawn, _entries(self._logits, list(self._drawn.values()), drawn) if drawn else []))
        for number, (token, row) in enumerate(zip(tokens, self._placed)):
            if row is None or row.result.error is not None:
                continue
            if token != LEFT:
                row.result.tokens = [token]
                if (entry := entries.get(number)) is not None:
                    row.result.logprobs = [entry]
            elif number in self._drawn:
                at = list(self._drawn).index(number)
                row.result.logits = self._logits[at : at + 1].cpu()
            else:  # its own logits have been written over; their sampler says the same of these
                row.result.logits = torch.full((1, vocab_size), torch.nan, device="cpu")


def _fetch_verified(kind: StepKind, placed: Sequence[PlacedRow | None], likeliest: list[int], each: int) -> None:
    """As ``fetch_tokens`` where a row has ``each`` tokens at most. Requests whose sampler sees the tokens one by one
    share a copy of their logits."""
    left: list[tuple[int, RequestResult]] = []
    sampled: list[tuple[int, RequestResult, RowSampling, int]] = []
    for number, row in enumerate(placed):
        if row is None or row.result.error is not None:
            continue
        for at, result in enumerate(row.result.rows, number * each):
            if row.scheduled.greedy and likeliest[at] >= 0:
                result.tokens = [likeliest[at]]
            elif row.scheduled.sampling is not None and likeliest[at] >= 0:
                sampled.append((at, result, row.scheduled.sampling, row.scheduled.start + at - number * each + 1))
            else:
                left.append((at, result))
    if sampled:
        logits = kind.logits[_whole([at for at, _, _, _ in sampled], kind.logits.device)]
        tokens, logprobs = choose_tokens(
            logits, [asked for _, _, asked, _ in sampled], [place for *_, place in sampled]
        )
        for (at, result, _, _), token, entries in zip(sampled, tokens, logprobs):
            if token == LEFT:
                left.append((at, result))
                continue
            result.tokens, result.logprobs = [token], None if entries is None else [entries]
    if left:
        logits = kind.logits[_whole([at for at, _ in left], kind.logits.device)].cpu()
        for at, (_, result) in enumerate(left):
            result.logits = logits[at : at + 1]


def choose_tokens(
    logits: Tensor, asked: Sequence[RowSampling], places: Sequence[int]
) -> tuple[list[int], list[LogprobEntries | None]]:
    """The tokens of rows ``logits`` fp32 [rows, vocab], each at its place of its sequence, and what each row wants to
    know of its log-probabilities. ``LEFT`` where the logits, or what became of them, have no finite maximum.

    A row's token does not depend on the rows beside it.
    """
    chosen = _chosen(logits, asked, places).tolist()
    return chosen, _entries(logits, asked, chosen)


def _chosen(logits: Tensor, asked: Sequence[RowSampling], places: Sequence[int]) -> Tensor:
    """The tokens alone, where the logits lie: int64 [rows]. Nothing waits for the device."""
    scores = _steered(logits, asked)
    tokens, greatest = scores.argmax(-1), scores.amax(-1)
    drawn = [row for row, one in enumerate(asked) if one.temperature > 0]
    if drawn:
        # A lone row would be scanned by another kernel, which adds up in another order: it goes twice.
        rows = drawn if len(drawn) > 1 else drawn * 2
        at = _whole(rows, logits.device)
        theirs = [asked[row] for row in rows]
        warped = _warped(scores[at], theirs)
        tokens[at], greatest[at] = _draw(warped, theirs, [places[row] for row in rows]), warped.amax(-1)
    sound = logits.amax(-1).isfinite() & greatest.isfinite()
    return torch.where(sound, tokens, LEFT)


def _whole(values: Sequence[int], device: torch.device) -> Tensor:
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
        last = best.gather(-1, _whole([min(rank, most) - 1 for rank in ranks], scores.device)[:, None])
        limited = _whole([rank < vocab for rank in ranks], scores.device).bool()[:, None]
        scores = scores.masked_fill(limited & (scores < last), -torch.inf)
    if any(one.top_p < 1.0 for one in asked):
        rising, order = torch.sort(scores)
        # `1 - top_p` is rounded once, as the number that transformers compares with.
        rest = torch.tensor([1 - one.top_p for one in asked], dtype=torch.float64)
        rest = _over(rest, scores.device, scores.dtype)[:, None]
        gone = rising.softmax(-1).cumsum(-1) <= rest
        gone[:, -1] = False
        gone &= _whole([one.top_p < 1.0 for one in asked], scores.device).bool()[:, None]
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
        _whole([one.seed for one in asked], device),
        _whole([one.sample for one in asked], device),
        _whole(places, device),
    )
    cumulative = torch.softmax(scores.double(), -1).cumsum(-1)
    wanted = draws[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def _entries(logits: Tensor, asked: Sequence[RowSampling], chosen: Sequence[int]) -> list[LogprobEntries | None]:
    """Log-probabilities of the rows that want some."""
    found: list[LogprobEntries | None] = [None] * len(asked)
    by_count: dict[int, list[int]] = {}
    for row, one in enumerate(asked):
        if one.logprobs is not None and chosen[row] != LEFT:
            by_count.setdefault(one.logprobs, []).append(row)
    for count, rows in by_count.items():  # by themselves: the rank of equals depends on how many are asked for
        entries = row_logprobs(logits[_whole(rows, logits.device)], [chosen[row] for row in rows], count)
        for row, every in zip(rows, entries):
            found[row] = every
    return found
