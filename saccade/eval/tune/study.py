"""Trying policies on a checkpoint: drift over texts, then the time that what is left takes beside dense attention."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from saccade.engine.settings.config import EngineConfig
from saccade.engine.settings.pays import Untimed, lengths_of, pays_from, timed
from saccade.errors import RequestError, SaccadeError
from saccade.eval.drift.measure import compared, run
from saccade.eval.drift.recommend import BOUND
from saccade.eval.drift.study import EXACT, ROUNDED, Source
from saccade.eval.setting import load
from saccade.eval.tune.ladders import LADDERS, Ladder
from saccade.eval.tune.trial import ROUNDING, Limits, Text, Trial, Tried, is_safe
from saccade.llm import LLM
from saccade.machine import available_bytes, show_bytes
from saccade.methods.policy import Policy
from saccade.models.head_order import HeadDensities, gains
from saccade.models.tuned import Tuned, keep_tuned, place_of
from saccade.models.tuned_heads import keep_heads

SHARE = 0.8  # of the free memory, that a second copy of the model may take
NEARLY = 0.9  # a made text may be a few tokens shorter than what it is to have
TIMING = 0.3  # of the time, that is kept for timing

Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """``roundings``: the share of tokens that bfloat16's rounding leaves, by text; empty where it was not measured.
    ``tuned``: what is kept, dense where nothing is left that reads less. ``file``: where it was written, None where the
    system refused, and ``unwritten`` why; ``heads``: the file of what each KV head reads, None where that is not
    known."""

    tried: list[Tried]
    roundings: dict[str, float]
    tuned: Tuned
    said: str
    file: Path | None
    heads: Path | None = None
    unwritten: SaccadeError | None = None


def tune(
    config: EngineConfig,
    source: Source,
    *,
    also: Sequence[Source] = (),
    bound: float = BOUND,
    seconds: float = 120.0,
    rounding: bool = True,
    ladders: Sequence[Ladder] = LADDERS,
    least: int = 0,
    seed: int = 0,
    note: Say = lambda text: None,
    started: Callable[[LLM], Any] = lambda llm: None,
) -> Found:
    """Find what the model of ``config`` allows over a text, in about so many ``seconds`` beside what dense attention
    takes (one policy that has begun is finished), time it, and keep it where ``auto`` finds it. ``also``: further texts
    over which it has to hold: one that a model foresees word by word hides what a policy loses. ``least``: tokens that
    some text must have, or what a context has room for, for others than the safe preset's settings to be tried: of
    shorter ones they read nearly all. ``rounding``: measure what bfloat16 rounding does, too, which loads the model in
    the other dtype beside, where there is memory for that. SaccadeError as for any run."""
    config = replace(config, enable_prefix_caching=True, policy=Policy())  # what prefills alike shares one prefill
    with load(config) as llm:
        started(llm)
        if isinstance(short := lengths_of(llm.engine), Untimed):
            way = "" if llm.model.spec.max_position == llm.max_model_len else "; a larger max_model_len gives it more"
            raise RequestError(f"there is nothing to tune: {short.why}; policy auto stays dense there{way}")
        texts = [_read(llm, one, seed) for one in (source, *also)]
        longest = max(len(one.passage.ids) for one in texts)
        if longest < NEARLY * min(least, llm.engine.checks.limits.room):
            note(
                f"of {longest:,} tokens others than the preset read nearly all: it alone is tried; --length gives more"
            )
            ladders = [Ladder(one.phase, tuple(filter(_is_safe_rung, one.rungs))) for one in ladders]
        roundings = _roundings(llm, config, texts, note) if rounding else {}
        began = time.monotonic()
        trial = Trial(llm, [(one, Limits(bound, roundings.get(one.name))) for one in texts], seed)
        until = began + (1 - TIMING) * seconds
        tried = _climbed(trial, ladders, until, note)
        chosen, joint = _joined(trial, tried, note)
        tried += joint
        policy = Policy() if chosen is None else Policy.parse(chosen.policy)
        times = None
        if chosen is not None:
            left = began + seconds - time.monotonic()
            measured = timed(llm.engine, policy, max(TIMING * seconds, left), always=True)
            if isinstance(measured, Untimed):
                raise RequestError(f"'{policy.text}' holds the bounds, but is not kept: {measured.why}")
            times = measured
        tuned = Tuned(
            policy.text,
            " and ".join(one.name for one in texts),
            longest,
            0.0 if chosen is None else float(f"{chosen.kl:.4g}"),
            1.0 if chosen is None else chosen.agree,
            min(roundings.values(), default=None),
            times,
            datetime.date.today().isoformat(),
            [one.row for one in tried],
        )
        densities = None if chosen is None else _densities(llm, tuned, chosen, tried)
        found = Found(tried, roundings, tuned, said_of(tuned, densities), None)
        try:  # what minutes found is told even where it cannot be written
            file = keep_tuned(llm.model, place_of(llm.model, config.threads, config.kv_dtype), tuned)
            found = replace(found, file=file)
            if densities is not None and densities.phases:
                found = replace(found, heads=keep_heads(llm.model.path, config.layers, densities))
        except RequestError as error:
            found = replace(found, unwritten=error)
        return found


def _read(llm: LLM, source: Source, seed: int) -> Text:
    """A text of ``source``, and dense attention over it."""
    name, passage = source(llm)
    llm.engine.checks.prompt(list(passage.ids[:-1]))
    return Text(name, passage, *run(llm, passage, Policy(), seed=seed, weights=False))


def _densities(llm: LLM, tuned: Tuned, chosen: Tried, tried: Sequence[Tried]) -> HeadDensities:
    """What each KV head read under the policy that is kept: the mean of its query heads."""
    spec, kept = llm.model.spec, Policy.parse(tuned.policy)
    group, found = spec.heads // spec.kv_heads, dict[str, tuple[tuple[float, ...], ...]]()
    for phase in ("prefill", "decode"):
        method = getattr(kept, phase)
        ran = chosen
        if phase == "prefill":  # whose rows all trials take from the first
            ran = next(one for one in tried if Policy.parse(one.policy).prefill == method)
        rows = ran.heads.get(phase, [])
        if len(rows) == spec.layers and not method.is_dense:
            found[phase] = tuple(tuple(fmean(row[at : at + group]) for at in range(0, len(row), group)) for row in rows)
    return HeadDensities(tuned.policy, tuned.text, tuned.made, **found)


def said_of(tuned: Tuned, densities: HeadDensities | None = None) -> str:
    """What ``auto`` makes of it, and processes that share the model out."""
    policy = Policy.parse(tuned.policy)
    if tuned.times is None:
        return (
            "Stay with dense: no policy that was tried reads less within the bounds. auto stays dense for this model."
        )
    parts = []
    for phase in ("prefill", "decode"):
        method = getattr(policy, phase)
        if not method.is_dense:
            first = pays_from(tuned.times, phase)
            pays = "never pays on this machine" if first is None else f"pays from {first:,} tokens on"
            parts.append(f"{phase} by '{method.text}' {pays}")
    said = f"auto is '{tuned.policy}': {'; '.join(parts)}."
    for ranks, (plain, best) in ({} if densities is None else gains(densities)).items():
        if best < plain:
            said += (
                f"\nOf {ranks} processes that share the model out the busiest reads {plain:.2f} of their mean in a "
                f"layer, from now on {best:.2f}: KV heads go to them by what each reads."
            )
    return said


def _climbed(trial: Trial, ladders: Sequence[Ladder], until: float, note: Say) -> list[Tried]:
    """A rung of each ladder in turn, until one is too far or the time is over. The safe preset's are tried in any
    case: a model that was tuned would else have less than one that was not."""
    tried: list[Tried] = []
    late: list[str] = []
    left = [(ladder, iter(ladder.rungs)) for ladder in ladders]
    while left:
        for ladder, rungs in list(left):
            text = next(rungs, None)
            if text is None:
                left.remove((ladder, rungs))
                continue
            if tried and time.monotonic() > until and not _is_safe_rung(text):
                late += [text, *rungs]
                left.remove((ladder, rungs))
                continue
            try:
                one = trial.of(text, ladder.phase)
            except SaccadeError as error:  # a model that it does not serve
                note(f"{text}: {error}")
                left.remove((ladder, rungs))
                continue
            tried.append(one)
            note(f"{text}: KL {one.kl:.4f}, {100 * one.agree:.1f} % agree" + (f": {one.why}" if one.why else ""))
            if one.why is not None:
                left.remove((ladder, rungs))
    if late:
        note(f"the time is over; not tried: {', '.join(late)}; more --seconds give it more")
    return tried


def _joined(trial: Trial, tried: Sequence[Tried], note: Say) -> tuple[Tried | None, list[Tried]]:
    """What is fastest of those within the bounds: a prefill and a decode method together, where that is within them
    too, else the safe preset's, if both are within the bounds; else the one of the fastest two that saves more. And
    what was run for it."""
    fit = [one for one in tried if one.why is None and one.density < 1]
    best = _fastest(fit)
    if len(best) < 2:
        return next(iter(best.values()), None), []
    joint: list[Tried] = []
    for pair in (best, _fastest([one for one in fit if is_safe(Policy.parse(one.policy))])):
        parts = {phase: getattr(Policy.parse(one.policy), phase) for phase, one in pair.items()}
        text = Policy(**parts).text
        if len(pair) < 2 or text in [one.policy for one in joint]:
            continue
        both = trial.of(text, "prefill")
        joint.append(both)
        note(f"{both.policy}: KL {both.kl:.4f}, {100 * both.agree:.1f} % agree" + (f": {both.why}" if both.why else ""))
        if both.why is None:
            return both, joint
    return max(best.values(), key=lambda one: one.dense_seconds - one.seconds), joint


def _fastest(fit: Sequence[Tried]) -> dict[str, Tried]:
    """Of each phase that there is one of, the fastest."""
    own = {phase: [one for one in fit if one.phase == phase] for phase in ("prefill", "decode")}
    return {phase: min(some, key=lambda one: one.seconds) for phase, some in own.items() if some}


def _roundings(llm: LLM, config: EngineConfig, texts: Sequence[Text], note: Say) -> dict[str, float]:
    """By text the share of tokens that agree between dense attention in float32 and in bfloat16, of which the texts'
    logits are one; empty, with a note, where the other is not to be had."""
    spec, pool = llm.model.spec, llm.pool
    why = None
    if config.quantize is not None or spec.dtype not in (EXACT, ROUNDED):
        why = f"the model runs in {config.quantize or str(spec.dtype).removeprefix('torch.')}"
    other = ROUNDED if spec.dtype == EXACT else EXACT
    longest = max(len(one.passage.ids) for one in texts)
    room = 2 * spec.stored * pool.format.block_bytes * (pool.format.blocks(longest) + 1)
    room = 2 * room if other == EXACT else room
    needs = room + llm.model.weight_bytes * (2 if other == EXACT else 1)
    if why is None and needs > SHARE * _free_bytes(llm):
        why = f"a second copy of the model in {str(other).removeprefix('torch.')} takes {show_bytes(needs)}"
    if why is not None:
        note(f"what bfloat16's rounding does is not measured: {why}; it is taken to leave {100 * ROUNDING:.0f} %")
        return {}
    found = {}
    with load(replace(config, dtype=other, kv_memory=room)) as second:
        for one in texts:
            logits, _ = run(second, one.passage, Policy(), weights=False)
            exact, rounded = (one.dense, logits) if other == ROUNDED else (logits, one.dense)
            found[one.name] = fmean(compared(rounded, exact, one.passage)["agree"])
    return found


def _is_safe_rung(text: str) -> bool:
    return is_safe(Policy.parse(text))


def _free_bytes(llm: LLM) -> int:
    if llm.model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(llm.model.device)[0])
    return available_bytes()
