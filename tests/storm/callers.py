"""Who calls: threads and asyncio tasks with prompts, samples, streams that are left, and turns of sessions."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace

import torch
from storm.faults import Faults
from tiny_models import random_ids

from saccade import LLM, SamplingParams
from saccade.errors import PolicyError
from saccade.methods.policy import Policy
from saccade.outputs import RequestOutput

AGAIN = "computed again from where a state"


@dataclass(frozen=True)
class Ask:
    """A request, and the tokens that an engine gives for it which has nothing else to do; one list a sample."""

    ids: list[int]
    params: SamplingParams
    policy: str
    answers: list[list[int]]


@dataclass(frozen=True)
class Talk:
    """Turns of a session."""

    policy: str
    turns: list[tuple[list[int], SamplingParams]]
    answers: list[list[int]]


@dataclass
class Ledger:
    """What became of the requests. ``exact``: answers must be those of a quiet engine to the token."""

    asks: list[Ask]
    talks: list[Talk]
    faults: Faults
    left: int
    exact: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    number: int = 0

    def take(self) -> tuple[str, random.Random] | None:
        with self.lock:
            if self.left <= 0:
                return None
            self.left -= 1
            self.number += 1
            return f"request {self.number}", random.Random(self.number)

    def another(self) -> str:
        """A request beyond the first of a taken one: a session's next turn."""
        with self.lock:
            self.left -= 1
            self.number += 1
            return f"request {self.number}"

    def note(self, outcome: str, wrong: str | None = None) -> None:
        with self.lock:
            self.counts[outcome] += 1
            if wrong is not None:
                self.wrong.append(wrong)

    def answered(self, name: str, got: list[int], want: list[int], ended: bool = True) -> None:
        right = got == (want if ended else want[: len(got)])
        if not right and not self.exact:
            self.note("rounded otherwise")
            return
        self.note("answered" if ended else "left", None if right else f"{name}: {got} instead of {want}")

    def told(self, name: str, report: dict) -> None:
        """What is computed again, since a state of the model's layers went, is said."""
        again, said = report["recomputed_tokens"] > 0, any(AGAIN in one for one in report["notes"])
        if again != said:
            self.note("silent", f"{name}: {report['recomputed_tokens']} tokens computed again, notes {report['notes']}")
        elif again:
            self.note("computed again")

    def failed(self, name: str, error: object) -> None:
        self.note("failed", self.faults.blame(name, error))


def questions(llm: LLM, policies: list[str], seed: int) -> tuple[list[Ask], list[Talk]]:
    """What is asked, with the answers of ``llm``, which does nothing else: a prompt of each of ``policies``, and a talk
    where it comes up first."""
    asks, talks = [], []
    for number, policy in enumerate(policies):
        rng = random.Random(1000 * seed + number)
        ids = random_ids(rng.randint(30, 200), seed=rng.randint(0, 10**6))
        params = _params(rng)
        if number % 7 == 3:
            params = replace(params, n=rng.randint(2, 3))
        (output,) = llm.generate(ids, params, policy=policy)
        assert output.error is None, output.error
        asks.append(Ask(ids, params, policy, [one.token_ids for one in output.outputs]))
    for number, policy in enumerate(dict.fromkeys(policies)):
        rng = random.Random(2000 * seed + number)
        turns = [
            (random_ids(rng.randint(5, 90), rng.randint(0, 10**6)), _params(rng)) for _ in range(rng.randint(2, 4))
        ]
        with llm.session(policy) as session:
            answers = [session.generate(ids, params).outputs[0].token_ids for ids, params in turns]
        talks.append(Talk(policy, turns, answers))
    assert len({tuple(ask.answers[0]) for ask in asks}) > len(asks) // 2
    return asks, talks


def runs(llm: LLM, policy: str) -> bool:
    """Whether the model runs under a policy at all."""
    try:
        llm.engine.checks.policy(Policy.parse(policy))
    except PolicyError:
        return False
    return True


def _params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0, 0, 1)), seed=rng.randint(0, 99), max_tokens=rng.randint(1, 8), ignore_eos=True
    )


def in_a_thread(llm: LLM, ledger: Ledger) -> None:
    """Ask until nothing is left to ask."""
    torch.set_num_threads(1)
    try:
        while taken := ledger.take():
            name, rng = taken
            way = rng.random()
            if way < 0.35:
                _generate(llm, ledger, name, rng.choice(ledger.asks))
            elif way < 0.65:
                _stream(llm, ledger, name, rng.choice(ledger.asks), rng)
            else:
                _talk(llm, ledger, name, rng.choice(ledger.talks), rng)
    except BaseException as error:
        ledger.note("broken", f"a thread ended with {type(error).__name__}: {error}")
        raise


def _generate(llm: LLM, ledger: Ledger, name: str, ask: Ask) -> None:
    try:
        (output,) = llm.generate(ask.ids, ask.params, policy=ask.policy)
    except Exception as error:
        ledger.failed(name, error)
        return
    _check(ledger, name, ask, output)


def _check(ledger: Ledger, name: str, ask: Ask, output: RequestOutput) -> None:
    if output.error is not None:
        ledger.failed(name, output.error)  # of the first sample that failed; the others are as they should be
    ledger.told(name, output.report)
    for sample, want in zip(output.outputs, ask.answers):
        if sample.finish_reason != "error":
            ledger.answered(f"{name}, {ask.policy}, sample {sample.index}", sample.token_ids, want)


def _stream(llm: LLM, ledger: Ledger, name: str, ask: Ask, rng: random.Random) -> None:
    leave = rng.randint(0, 3) if rng.random() < 0.5 else None  # after so many items
    params = replace(ask.params, n=1)
    try:
        with closing(llm.stream(ask.ids, params, policy=ask.policy)) as items:
            tokens, error, ended = _read(items, leave)
    except Exception as raised:
        ledger.failed(name, raised)
        return
    if error is not None:
        ledger.failed(name, error)
    else:
        ledger.answered(f"{name}, {ask.policy}, stream", tokens, ask.answers[0], ended)


def _read(items: Iterator, leave: int | None) -> tuple[list[int], str | None, bool]:
    tokens: list[int] = []
    for count, item in enumerate(items):
        tokens += item.new_tokens
        if item.finished:
            return tokens, item.outcome.error, True
        if count == leave:
            break
    return tokens, None, False


def _talk(llm: LLM, ledger: Ledger, name: str, talk: Talk, rng: random.Random) -> None:
    """Turns; some are begun and left before they are really said, some fail and are said again."""
    with llm.session(talk.policy) as session:
        for number, ((ids, params), want) in enumerate(zip(talk.turns, talk.answers)):
            for attempt in range(8):
                if number or attempt:
                    name = ledger.another()
                if rng.random() < 0.3:
                    other = random_ids(rng.randint(1, 60), rng.randint(0, 999))
                    try:
                        with closing(session.stream(other, replace(params, max_tokens=100))) as items:
                            _, error, _ = _read(items, rng.randint(0, 2))
                    except Exception as raised:
                        error = str(raised)
                    if error is None:
                        ledger.note("left")
                    else:
                        ledger.failed(name, error)
                    name = ledger.another()
                try:
                    output = session.generate(ids, params)
                except Exception as error:
                    ledger.failed(name, error)
                    continue
                if output.error is not None:
                    ledger.failed(name, output.error)
                    continue
                ledger.told(name, output.report)
                ledger.answered(f"{name}, {talk.policy}, turn {number}", output.outputs[0].token_ids, want)
                break
            else:
                return  # one too often


async def in_a_task(llm: LLM, ledger: Ledger) -> None:
    """Ask, and cancel a part of it."""
    while taken := ledger.take():
        name, rng = taken
        ask = rng.choice([one for one in ledger.asks if one.params.n == 1])
        if rng.random() < 0.6:
            task = asyncio.create_task(llm.agenerate(ask.ids, ask.params, policy=ask.policy))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.uniform(0, 0.1))
                task.cancel()
            try:
                output = await task
            except asyncio.CancelledError:
                ledger.note("cancelled")
            except Exception as error:
                ledger.failed(name, error)
            else:
                _check(ledger, name, ask, output)
            continue
        leave, tokens, error, ended = rng.choice((0, 1, 2, None)), [], None, False
        try:
            async with aclosing(llm.astream(ask.ids, ask.params, policy=ask.policy)) as items:
                count = 0
                async for item in items:
                    tokens += item.new_tokens
                    if item.finished:
                        error, ended = item.outcome.error, True
                    if count == leave:
                        break
                    count += 1
        except Exception as raised:
            error = str(raised)
        if error is not None:
            ledger.failed(name, error)
        else:
            ledger.answered(f"{name}, {ask.policy}, task", tokens, ask.answers[0], ended)
