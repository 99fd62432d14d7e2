"""The tokens of recorded steps, chosen where their logits lie (:mod:`saccade.engine.sampling.choosing`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.engine.device.graphs import StepKind
from saccade.engine.device.watch import PlacedRow
from saccade.engine.sampling.choosing import LEFT, choose_tokens, chosen_there, entries_of, whole
from saccade.engine.sampling.sampler import NOT_FINITE
from saccade.engine.steps.row_sampling import RowSampling
from saccade.engine.steps.step import RequestResult


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
        logits = kind.logits[whole([number for number, _, _ in sampled], kind.logits.device)]
        places = [row.scheduled.stop for _, row, _ in sampled]
        tokens, logprobs = choose_tokens(logits, [asked for _, _, asked in sampled], places)
        for (number, row, _), token, entries in zip(sampled, tokens, logprobs):
            if token == LEFT:
                left.append((number, row))
                continue
            row.result.tokens, row.result.logprobs = [token], None if entries is None else [entries]
    if left:
        logits = kind.logits[whole([number for number, _ in left], kind.logits.device)].cpu()
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
            at = whole(list(self._drawn), kind.logits.device)
            self._logits = kind.logits[at]
            places = [row.scheduled.stop for number, row in enumerate(placed) if row and number in self._drawn]
            chosen = chosen_there(self._logits, list(self._drawn.values()), places)
            self.tokens = kind.best.clone()
            self.tokens[at] = torch.where(self.tokens[at] < 0, LEFT, chosen)

    @property
    def draws(self) -> bool:
        """Whether any token is drawn: numbers on another device may differ then."""
        return bool(self._drawn)

    def write(self, tokens: Sequence[int], vocab_size: int) -> None:
        """Write down each row's token, which is here now."""
        drawn = [tokens[number] for number in self._drawn]
        entries = dict(zip(self._drawn, entries_of(self._logits, list(self._drawn.values()), drawn) if drawn else []))
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
        logits = kind.logits[whole([at for at, _, _, _ in sampled], kind.logits.device)]
        tokens, logprobs = choose_tokens(
            logits, [asked for _, _, asked, _ in sampled], [place for *_, place in sampled]
        )
        for (at, result, _, _), token, entries in zip(sampled, tokens, logprobs):
            if token == LEFT:
                left.append((at, result))
                continue
            result.tokens, result.logprobs = [token], None if entries is None else [entries]
    if left:
        logits = kind.logits[whole([at for at, _ in left], kind.logits.device)].cpu()
        for at, (_, result) in enumerate(left):
            result.logits = logits[at : at + 1]
