"""From which length a policy pays: it and dense attention run over one text, each at two lengths, once a machine."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from saccade.engine.sampling.params import SamplingParams
from saccade.engine.settings.checks import Checks
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy
from saccade.models.loader import LoadedModel
from saccade.models.tuned import Times
from saccade.prose import generate

logger = logging.getLogger(__name__)

GAIN = 1.1  # dense has to take so many times as long: what two runs differ by is less
STEPS = 64  # lengths that are looked at
FURTHER = 4  # times the longest length measured, up to which what pays is predicted
REPEATS = 3  # where there is time
ANSWER = 17  # tokens of a timed answer; the first is the prefill's
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
LENGTHS_ON_GPU = (1024, 4096, 16384, 65536)  # at few tokens a step there is launches alone
APART = 4  # times the shorter of the two lengths that are timed, where there are as many to choose from
PROBE, PROBE_ON_GPU = 256, 1024  # tokens by which it is foreseen how long the timing takes
CHARS = 6  # of a token, at most, to begin with
_runs = itertools.count()


@dataclass(frozen=True)
class Untimed:
    """Why nothing was timed. ``later``: it may be tried again."""

    why: str
    later: bool = False


class Runs(Protocol):
    """An engine, as far as timing a policy needs it (engine/core.py)."""

    model: LoadedModel
    checks: Checks
    max_model_len: int
    prefixes: Any
    watch: Any

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        ...

    def add(self, prompt: list[int], params: SamplingParams, policy: Policy, *, cache_salt: str) -> Any:
        """Queue one sample."""
        ...

    def step(self) -> Any:
        """Run one step."""
        ...


def pays_from(times: Times, phase: str) -> int | None:
    """The fewest tokens from which on ``phase`` takes dense attention GAIN times as long, or longer, at every length up
    to FURTHER times the longest measured; None where there are none, or where it is slower at the longest measured:
    what lines through noise say of longer ones is noise. Between and beyond the lengths measured, a prefill is taken to
    cost a part in proportion to its length and one to its square, a step a constant and one in proportion; below them
    nothing pays."""
    dense = _curve(times.lengths, getattr(times, f"dense_{phase}"), phase, min)
    sparse = _curve(times.lengths, getattr(times, phase), phase, max)
    first, last = times.lengths[0], FURTHER * times.lengths[-1]
    found = None
    if dense(times.lengths[-1]) < sparse(times.lengths[-1]):
        return None
    for step in range(STEPS, -1, -1):
        length = round(first * (last / first) ** (step / STEPS))
        if dense(length) < GAIN * sparse(length):
            break
        found = length
    return found


def timed(engine: Runs, policy: Policy, seconds: float, always: bool = False) -> Times | Untimed:
    """Run ``policy`` and dense attention over made prose, by turns, at the greatest length for which that takes no more
    than about so many ``seconds`` and at a shorter one; with ``always`` at the two least where none are so short. The
    engine must have nothing else to do."""
    if engine.busy:
        return Untimed("other requests were running when it was to be timed", later=True)
    lengths = lengths_of(engine)
    if isinstance(lengths, Untimed):
        return lengths
    try:
        with _unseen(engine):
            return _timed(engine, policy, lengths, engine.model.device.type == "cuda", seconds, always)
    except (_FailedError, SaccadeError) as error:  # a policy that this model or its pool cannot run, too
        return Untimed(f"timing it failed: {error}")


def lengths_of(engine: Runs) -> list[int] | Untimed:
    """The lengths, rising, at which an engine can be timed; why not, where fewer than two fit."""
    every = LENGTHS_ON_GPU if engine.model.device.type == "cuda" else LENGTHS
    most = min(engine.max_model_len, engine.checks.most_tokens) - ANSWER - 1
    lengths = [length for length in every if length <= most]
    if len(lengths) < 2:
        return Untimed(f"timing takes {every[1] + ANSWER + 1:,} tokens, and a context holds {most + ANSWER + 1:,} here")
    return lengths


def _timed(
    engine: Runs, policy: Policy, lengths: list[int], on_gpu: bool, seconds: float, always: bool
) -> Times | Untimed:
    probed, dense = PROBE_ON_GPU if on_gpu else PROBE, Policy()
    ids = _text(engine, probed)
    _run(engine, ids, dense)  # what a process does once
    each = _run(engine, ids, dense)[0] / probed
    rounds = 2 if on_gpu else 1  # there what a length does once comes before its first run
    while len(lengths) > 2 and rounds * _foreseen(lengths, each) > seconds:
        lengths = lengths[:-1]
    wanted = rounds * _foreseen(lengths, each)
    if wanted > seconds and not always:
        return Untimed(f"timing it takes some {wanted:.0f} s, more than {seconds:.0f}; saccade tune takes the time")
    repeats = max(1, min(REPEATS, int(seconds // wanted)))
    lengths = both_ends(lengths)
    ids = _text(engine, lengths[-1])
    logger.info("timing dense attention and '%s' at %s tokens, once on this machine", policy.text, lengths)
    found = []
    for length in lengths:
        for one in (dense, policy) if on_gpu else ():
            _run(engine, ids[:length], one)  # compiles kernels, and records steps
        runs = [[_run(engine, ids[:length], one) for one in (dense, policy)] for _ in range(repeats)]
        theirs, own = ([min(row) for row in zip(*one)] for one in zip(*runs))  # what disturbs makes longer
        # On a busy machine the wall misleads by factors, and the process's clock hides what runs on one thread alone:
        # dense is told by the latter, and what pays has to pay by both.
        ratios = [max(own[at] / theirs[at], own[at + 2] / theirs[at + 2]) for at in (0, 1)]
        found.append((theirs[2], theirs[3], theirs[2] * ratios[0], theirs[3] * ratios[1]))
    prefill, decode, own_prefill, own_decode = (tuple(float(f"{one:.4g}") for one in row) for row in zip(*found))
    return Times(policy.text, tuple(lengths), prefill, own_prefill, decode, own_decode)


@contextmanager
def _unseen(engine: Runs) -> Iterator[None]:
    """What runs is shown to no observer, and leaves nothing behind for others: no prefix where there was none, and no
    counts."""
    prefixes = engine.prefixes
    if prefixes is None:
        with engine.watch.unseen():
            yield
        return
    counts, kept = (prefixes.queries, prefixes.hits), prefixes.kept_slots
    try:
        with engine.watch.unseen():
            yield
    finally:
        prefixes.queries, prefixes.hits = counts
        if not kept:
            prefixes.clear()


class _FailedError(Exception):
    pass


def _run(engine: Runs, ids: list[int], policy: Policy) -> tuple[float, float, float, float]:
    """Seconds of a prefill and of a decode step behind it, by the wall and by this process's own clock (on a GPU by the
    wall, twice), nothing shared with other runs."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, audit=0.0, audit_steps=0.0)
    own = time.perf_counter if engine.model.device.type == "cuda" else time.process_time
    began = marks = time.perf_counter(), own()
    request = engine.add(ids, params, policy, cache_salt=f"timing {next(_runs)}")
    while not request.finished:
        engine.step()
        if marks is began and (request.finished or request.output_ids):
            marks = time.perf_counter(), own()
    if request.error is not None:
        raise _FailedError(request.error)
    ended = time.perf_counter(), own()
    prefill, answer = ([max(b - a, 1e-9) for a, b in zip(*pair)] for pair in ((began, marks), (marks, ended)))
    return prefill[0], answer[0] / (ANSWER - 1), prefill[1], answer[1] / (ANSWER - 1)


def _text(engine: Runs, count: int) -> list[int]:
    """So many tokens of prose; of a model without a tokenizer, of any."""
    tokenizer, vocabulary = engine.model.tokenizer, engine.model.spec.vocab_size
    if tokenizer.hf is None:
        return [(17 * at * at + 31 * at + 7) % vocabulary for at in range(count)]
    ids: list[int] = []
    chars = CHARS * count
    while len(ids) < count:
        ids = tokenizer.encode(generate(chars, seed=0))
        chars *= 2
    return ids[:count]


def both_ends(lengths: Sequence[int]) -> list[int]:
    """The two of ``lengths``, rising, that are timed: the greatest, and the next that is APART times shorter, else the
    least: between and beyond them lines are drawn, and the nearer they lie the more of these is noise."""
    return [next((one for one in reversed(lengths) if APART * one <= lengths[-1]), lengths[0]), lengths[-1]]


def _foreseen(lengths: Sequence[int], each: float) -> float:
    """Seconds that runs of two policies at :func:`both_ends` of ``lengths`` take, where a short prefill takes ``each``
    a token: long ones take more, and steps come beside them."""
    return 1.5 * 2 * sum(both_ends(lengths)) * each


def _curve(
    lengths: Sequence[int], seconds: Sequence[float], phase: str, flat: Callable[[float, float], float]
) -> Callable[[float], float]:
    """Through the times at the first and the last length, a + b n of a step, a n + b n^2 of a prefill; where it falls,
    level at the one that ``flat`` takes."""
    (n, m), (s, t) = (lengths[0], lengths[-1]), (seconds[0], seconds[-1])
    if phase == "prefill":
        s, t = s / n, t / m
    slope = max(0.0, (t - s) / (m - n))
    start = t - slope * m if slope else flat(s, t)
    return lambda length: max(start + slope * length, 0.0) * (length if phase == "prefill" else 1.0)
