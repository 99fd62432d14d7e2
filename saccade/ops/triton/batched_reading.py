"""How recorded decode steps read: for each name of kernels that a reading may give (selection/readings.py), what is
launched; and which choices of blocks kernels score, rank and stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from saccade.ops.triton.batch import Pages
from saccade.ops.triton.batched_choice import choose_blocks
from saccade.ops.triton.batched_decode import Summaries, band_lists, score_blocks
from saccade.ops.triton.batched_guesses import Guesses, largest_shares, ordered_guesses
from saccade.ops.triton.batched_labels import estimate_labelled
from saccade.ops.triton.batched_moments import estimate_moments
from saccade.ops.triton.batched_rank import rank_blocks
from saccade.ops.triton.batched_rows import LayerRead, LayerRows, RuleRead
from saccade.ops.triton.dispatch import BLOCK_SIZES
from saccade.ops.triton.low_rank import score_records
from saccade.ops.triton.progressive import MOST_KEYS, attend_progressive
from saccade.selection.forms import LABELS, PlanSpec
from saccade.selection.readings import CHOICE, ENDS, OWN, Choice, Reading

SUMMARIES = ("cuboid", "minmax")  # that the scores' kernel reads
RECORDS = "low_rank"  # whose kernel weighs pages for each KV head, the best of which are read
GUESSING = ("moments", LABELS)  # by which kernels guess what blocks weigh, to rank them


def why_not(reading: Reading, spec: PlanSpec) -> str | None:
    """What no kernel serves of ``reading`` on such a model; None where kernels serve all of it."""
    choice = reading.choice
    if spec.value_dim is not None:
        plain = choice is not None and choice.rule is None and choice.source.summary in SUMMARIES
        if reading.kernels == OWN or not (choice is None or plain):
            return "its kernels read keys and values, not latents"
    return reading.why_not(spec) if choice is None else reading.why_not(spec) or _unread(choice, spec.kv_heads)


def read_rows(reading: Reading, rows: LayerRows) -> LayerRead:
    """Attend for ``rows``, whose keys are stored, as ``reading`` says."""
    return _READS[reading.kernels](reading, rows)


def _read_ends(reading: Reading, rows: LayerRows) -> LayerRead:
    assert reading.ends is not None
    sinks, window = reading.ends
    return rows.attended(None if window is None else band_lists(rows.pages, rows.first, rows.second, sinks + window))


def _read_choice(reading: Reading, rows: LayerRows) -> LayerRead:
    choice = reading.choice
    assert choice is not None
    if choice.rule is None:
        assert rows.summaries is not None
        if choice.source.summary == RECORDS:
            scores = score_records(rows.q, rows.pages, rows.summaries.pointers, choice, rows.scale, rows.softcap)
        else:
            scores = score_blocks(rows.q, rows.pages, rows.summaries, choice)
        return rows.attended(choose_blocks(scores, rows.pages, choice, rows.first, rows.second))
    ranked = rank_rows(rows.q, rows.pages, rows.summaries, rows.words, choice, rows.second, rows.scale, rows.softcap)
    always, order, counts, guesses = ranked
    arrivals, pages = rows.arrivals, rows.pages
    if arrivals is not None:
        if arrivals.waits:
            arrivals.bring_ranked(pages, ranked[:3], choice.size)
        else:
            pages = arrivals.find(pages)
    rows.time("attention")
    done = attend_progressive(
        rows.q, pages, always, order, choice.size, choice.rule, scale=rows.scale, softcap=rows.softcap,
        counts=counts, epsilon=rows.share, before=rows.reach, guesses=guesses,
    )  # fmt: skip
    if arrivals is not None and arrivals.waits:
        arrivals.follow(done.used, choice.rule.microbatch, counts[1])
    elif arrivals is not None:
        arrivals.ranks_read(pages, ranked[:3], choice.size, done.used, choice.rule.microbatch)
    ruled = RuleRead(done.used, choice.rule.microbatch, choice.size, done.coverage, counts[1])
    return LayerRead(done.out, done.lse, None, ruled=ruled, ranking=(always, order, counts[0]))


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
    guesses = ordered_guesses(estimates.blocks, order, counts, rule.microbatch) if rule.rest == "estimate" else None
    return Ranked(always, order, counts, guesses)


_READS: dict[str, Callable[[Any, LayerRows], LayerRead]] = {
    ENDS: _read_ends,
    CHOICE: _read_choice,
    OWN: lambda reading, rows: reading.read(rows),
}


def _unread(choice: Choice, kv_heads: int) -> str | None:
    summary, rule = choice.source.summary, choice.rule
    if choice.size not in BLOCK_SIZES:
        return f"the kernels read blocks of {', '.join(map(str, BLOCK_SIZES))} keys, not of {choice.size}"
    if summary == RECORDS and (rule is not None or choice.units != kv_heads):
        return "the kernels weigh low-rank records for each KV head, and read the best"
    if summary not in (*SUMMARIES, RECORDS) and (rule is None or summary not in GUESSING):
        return f"the kernels score the summaries {' and '.join(SUMMARIES)}, not {summary}"
    if kv_heads % choice.units:
        return f"the kernels choose for whole KV heads, not for {choice.units} units of {kv_heads} of them"
    if rule is not None and choice.units != kv_heads:
        return "the kernels stop for each KV head by itself"
    if rule is not None and rule.microbatch * choice.size > MOST_KEYS:
        return f"a microbatch is at most {MOST_KEYS} keys, not {rule.microbatch} blocks of {choice.size}"
    return None
