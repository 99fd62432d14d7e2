"""A trace of requests replayed on an engine, by a clock that may skip what other load takes: each request comes when
the clock has got there, and every step takes what the clock says."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from saccade import LLM, SamplingParams
from saccade.bench.serve import Load, plan
from saccade.engine.core import Engine
from saccade.engine.request import Request
from saccade.engine.scheduling.batch_control import BatchControl
from saccade.eval.metrics import score
from saccade.eval.render import render
from saccade.eval.samples import Turn
from saccade.eval.suite import make
from saccade.kv.host import HostTier
from saccade.methods.policy import Policy

TOKENS_A_WORD = 1.3
TASKS = ("multikey", "multivalue", "multiquery", "vt", "words", "common", "span_copy", "single")  # one for each set
CLOCKS: dict[str, Callable[[], float]] = {"processor": time.process_time, "wall": time.perf_counter}


@dataclass(frozen=True)
class System:
    name: str
    policy: str
    tiered: bool = True
    pool: str = "unified"
    hidden: bool = False  # copies run beside all else


@dataclass
class Asked:
    """A request of the trace: ``at`` for one request a second."""

    at: float
    ids: list[int]
    most: int
    turn: Turn
    request: Request | None = None
    waited: float = 0.0
    told: int = 0
    last: float = 0.0
    first: float = 0.0  # seconds to the first token
    gaps: list[float] = field(default_factory=list)  # and from each token to the next

    def kept(self, bound: float, queue: float) -> bool:
        """Whether 99 % of the gaps are within ``bound``, and it waited for at most ``queue``."""
        late = sum(gap > bound for gap in self.gaps)
        return late <= 0.01 * len(self.gaps) and self.waited <= queue


@dataclass
class Ran:
    """What a run of the trace has shown."""

    sustained: bool = True
    seconds: float = 0.0
    batches: list[int] = field(default_factory=list)
    iterations: list[float] = field(default_factory=list)  # seconds of steps without prefill rows
    mixed: list[float] = field(default_factory=list)  # seconds of the others, of which some decode rows, too
    beside: int = 0  # of them
    right: float = 0.0
    density: float = 1.0  # of decode
    hits: float = 1.0
    copying: float = 0.0  # share of the seconds

    @property
    def prefill(self) -> float:
        """The share of the seconds that steps with prefill rows take beyond a decoding iteration."""
        return max(0.0, sum(self.mixed) - self.beside * median(self.iterations or [0.0])) / self.seconds


def trace(llm: LLM, options: argparse.Namespace) -> list[Asked]:
    asked = []
    for one in plan(Load("longbench", options.requests, 1.0, scale=options.scale, seed=options.seed)):
        (words, most), number = one.turns[0], one.number
        tokens = max(128, round(words * TOKENS_A_WORD))
        turn = make(TASKS[number % len(TASKS)], tokens, number).turns[0]
        most = options.tokens or max(4, round(options.answers * most))
        asked.append(Asked(one.at, render(llm.tokenizer, [], turn).ids, most, turn))
    return asked


class Replay:
    """``asked`` at ``rate`` requests a second on an engine of its own."""

    def __init__(self, llm: LLM, system: System, clock: Callable[[], float]) -> None:
        self.llm, self.system, self.clock = llm, system, clock
        self.engine: Engine = llm.engine
        self.copying = 0.0
        tiers = llm.pool.tiers
        if tiers is not None:
            assert isinstance(tiers.tier, HostTier)
            for name in ("read", "write"):
                setattr(tiers.tier, name, self._timed(getattr(tiers.tier, name)))
        control = self.engine.scheduler.control
        self._began, ran = 0.0, BatchControl.ran
        # What steps take is learnt by this clock, too.
        control.ran = lambda batch, _, results: ran(control, batch, clock() - self._began, results)  # type: ignore[method-assign,assignment]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = self.clock()
            try:
                return call(*given)
            finally:
                self.copying += self.clock() - began

        return timed

    def run(self, asked: list[Asked], rate: float = 1e9, bound: float = 1e9, queue: float = 1e9) -> Ran:
        """All requests come at once, and may wait as long as it takes, unless told otherwise."""
        engine, policy, found = self.engine, Policy.parse(self.system.policy), Ran()
        waiting, running, now = deque(asked), list[Asked](), 0.0
        for one in asked:
            one.request, one.gaps = None, []
        gaps = late = 0
        may_gap, may_wait = 0.01 * sum(one.most - 1 for one in asked), len(asked) / 2
        before, copied = self._counts(), self.copying
        while waiting or running:
            while waiting and waiting[0].at / rate <= now:
                one = waiting.popleft()
                params = SamplingParams(temperature=0, max_tokens=one.most, ignore_eos=True)
                one.request, one.told, one.waited = engine.add(one.ids, params, policy), 0, -1.0
                running.append(one)
            if not running:
                now = waiting[0].at / rate
                continue
            prefills = any(one.request is not None and not one.told for one in running)
            began, copies = self.clock(), self.copying
            self._began = began
            engine.step()
            took, copies = self.clock() - began, self.copying - copies
            took = max(took - copies, copies) if self.system.hidden else took
            begun = now
            now += took
            scheduled = {id(one) for one in engine.scheduler.running}
            for one in running:
                request = one.request
                assert request is not None
                if one.waited < 0 and (id(request) in scheduled or request.finished):
                    one.waited = begun - one.at / rate
                    late += one.waited > queue
                count = len(request.output_ids or request.final_ids or ())
                if count > one.told:
                    gaps += one.told > 0 and now - one.last > bound
                    if one.told:
                        one.gaps += [(now - one.last) / (count - one.told)] * (count - one.told)
                    else:
                        one.first = now - one.at / rate
                    one.told, one.last = count, now
            if prefills:
                found.mixed.append(took)
                found.beside += any(one.told > 0 for one in running)
            else:
                found.iterations.append(took)
            found.batches.append(sum(one.told > 0 for one in running))
            failed = [one.request.error for one in running if one.request is not None and one.request.error]
            if failed:
                raise SystemExit(f"{self.system.name}: a request failed: {failed[0]}")
            running = [one for one in running if one.request is not None and not one.request.finished]
            if gaps > may_gap or late > may_wait:
                found.sustained = False
                break
        for one in running:
            if one.request is not None:
                engine.cancel(one.request)
        found.seconds = now
        self._account(found, asked, before, copied)
        return found

    def _score(self, one: Asked) -> float:
        assert one.request is not None
        ids = (one.request.final_ids or one.request.output_ids)[: one.turn.max_new_tokens]
        return score(one.turn.metric, self.llm.tokenizer.decode(ids), list(one.turn.answers))

    def _counts(self) -> Any:
        tiers = self.llm.pool.tiers
        return None if tiers is None else tiers.counts.copy()

    def _account(self, found: Ran, asked: list[Asked], before: Any, copied: float) -> None:
        done = [one for one in asked if one.request is not None and one.request.finished and not one.request.error]
        if done:
            decodes = [one.request.report.as_dict()["decode"] for one in done if one.request is not None]
            found.density = sum(one["keys_attended"] for one in decodes) / sum(one["keys_causal"] for one in decodes)
            found.right = fmean(map(self._score, done))
        tiers = self.llm.pool.tiers
        if tiers is not None:
            moved = tiers.counts.since(before)
            found.hits = moved.hits / max(1, moved.hits + moved.misses)
            found.copying = (self.copying - copied) / max(1e-9, found.seconds)
