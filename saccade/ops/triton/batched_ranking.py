"""Blocks of many rows ranked for the progressive loop of a batched decode step, by whatever a reading says."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from saccade.ops.triton.batched_decode import Summaries, score_blocks
from saccade.ops.triton.batched_guesses import Guesses, largest_shares, ordered_guesses
from saccade.ops.triton.batched_labels import estimate_labelled
from saccade.ops.triton.batched_moments import estimate_moments
from saccade.ops.triton.batched_rank import rank_blocks
from saccade.ops.triton.decode import Pages
from saccade.selection.readings import Choice


class Ranked(NamedTuple):
    """``always``, ``order`` and ``counts`` are those of batched_rank.rank_blocks; ``guesses``, where the stopping rule
    goes by them, are in that order."""

    always: Tensor
    order: Tensor
    counts: Tensor
    guesses: Guesses | None


def rank_rows(
    q: Tensor,
    pages: Pages,
    summaries: Summaries | None,
    words: Tensor,
    choice: Choice,
    dense_upto: Tensor,
    scale: float,
    softcap: float | None,
) -> Ranked:
    """Rank the blocks of each row, whose new key is stored: ``q`` [rows, heads, head_dim] by ``summaries``, or by the
    labels that the rows' ``words`` (batched_labels.py) tell of, which the new key then has too."""
    if choice.labelled:
        estimates = estimate_labelled(q, pages, words, choice, dense_upto, scale, softcap)
    else:
        assert summaries is not None
        if choice.source.summary != "moments":
            scores = score_blocks(q, pages, summaries, choice)
            return Ranked(*rank_blocks(scores, pages, choice, dense_upto), None)
        estimates = estimate_moments(q, pages, summaries, choice, scale, softcap)
    always, order, counts = rank_blocks(largest_shares(estimates, pages, choice, dense_upto), pages, choice, dense_upto)
    rule = choice.stops
    guesses = ordered_guesses(estimates, order, counts, rule.microbatch) if rule.rest == "estimate" else None
    return Ranked(always, order, counts, guesses)
