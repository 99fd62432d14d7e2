"""Threads and asyncio tasks call one LLM at once: every answer is the quiet one, none is lost, nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, closing
from dataclasses import dataclass, field

import pytest
from tiny_models import make_checkpoint, one_thread, random_ids  # noqa: F401

from saccade import LLM, SamplingParams

CALLERS = 64  # threads, and as many tasks
REQUESTS = 600
SECONDS = 400  # for all of it; it takes about a tenth of that
POLICIES = (
    "dense",
    "topk(k=16)",
    "streaming(sinks=2, window=24)",
    "psa(epsilon=0.4, block_size=8, microbatch=1)",
    "arkvale(budget=48, block_size=8)",
    "lfps(k=24, blocks=2, least=1)",
    "cis(k=20, sinks=2, local=8, tau=0.0)",
    "flexprefill(gamma=0.4, block_size=64, min_budget=0)+quest(budget=32, dense_layers=0)",
)


@dataclass(frozen=True)
class Ask:
    """A request, and the tokens that a quiet engine gives it."""

    ids: list[int]
    params: SamplingParams
    policy: str
    answer: list[int]


@dataclass
class Ledger:
    """What became of every request, by its number; callers take numbers until none is left."""

    asks: list[Ask]
    left: list[int] = field(default_factory=lambda: list(range(REQUESTS)))
    outcomes: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> tuple[int, Ask, random.Random] | None:
        with self.lock:
            if not self.left:
                return None
            number = self.left.pop()
        return number, self.asks[number % len(self.asks)], random.Random(number)

    def note(self, number: int, outcome: str) -> None:
        with self.lock:
            if number in self.outcomes:
                self.wrong.append(f"request {number} ended twice: {self.outcomes[number]}, {outcome}")
            self.outcomes[number] = outcome

    def check(self, number: int, ask: Ask, tokens: list[int], whole: bool = True) -> None:
        """``tokens`` are the answer; or, of a request that was left early, its beginning."""
        if tokens != (ask.answer if whole else ask.answer[: len(tokens)]):
            self.wrong.append(f"request {number} ({ask.policy}): {tokens} instead of {ask.answer}")
        self.note(number, "answered" if whole else "left")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A pool for some twenty requests at once, of whom up to 128 ask."""
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("storm"), hidden_size=64, max_position_embeddings=2048)
    threads = set(threading.enumerate())
    made = LLM(folder, dtype="float32", kv_memory="5MiB", prefill_chunk=64, threads=1, enable_prefix_caching=False)
    yield made
    made.close()
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.fixture(scope="module")
def asks(llm) -> list[Ask]:
    made = []
    for number in range(48):
        rng = random.Random(number)
        ids = random_ids(rng.randint(40, 120), seed=number)
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 6), ignore_eos=True)
        policy = POLICIES[number % len(POLICIES)]
        (output,) = llm.generate(ids, params, policy=policy)
        made.append(Ask(ids, params, policy, output.outputs[0].token_ids))
    assert len({tuple(ask.answer) for ask in made}) > 24
    return made


def in_a_thread(llm: LLM, ledger: Ledger) -> None:
    while taken := ledger.take():
        number, ask, rng = taken
        if rng.random() < 0.5:
            (output,) = llm.generate(ask.ids, ask.params, policy=ask.policy)
            ledger.check(number, ask, output.outputs[0].token_ids)
            continue
        leave = rng.randint(0, 3) if rng.random() < 0.4 else None  # after so many items
        tokens: list[int] = []
        with closing(llm.stream(ask.ids, ask.params, policy=ask.policy)) as stream:
            ended = False
            for count, item in enumerate(stream):
                tokens += item.new_tokens
                ended = item.finished
                if count == leave:
                    break
        ledger.check(number, ask, tokens, whole=ended)


async def in_a_task(llm: LLM, ledger: Ledger) -> None:
    while taken := ledger.take():
        number, ask, rng = taken
        way = rng.random()
        if way < 0.6:
            task = asyncio.create_task(llm.agenerate(ask.ids, ask.params, policy=ask.policy))
            if way < 0.2:
                await asyncio.sleep(rng.uniform(0, 0.2))
                task.cancel()
            try:
                output = await task
            except asyncio.CancelledError:
                ledger.note(number, "cancelled")
            else:
                ledger.check(number, ask, output.outputs[0].token_ids)
            continue
        leave = rng.randint(0, 3) if way < 0.8 else None
        tokens: list[int] = []
        async with aclosing(llm.astream(ask.ids, ask.params, policy=ask.policy)) as stream:
            ended, count = False, 0
            async for item in stream:
                tokens += item.new_tokens
                ended = item.finished
                if count == leave:
                    break
                count += 1
        ledger.check(number, ask, tokens, whole=ended)


def kept(ledger: Ledger, run: Callable[[], None]) -> Callable[[], None]:
    """``run``, whose failure the ledger keeps: a thread's own would go unseen."""

    def call() -> None:
        try:
            run()
        except BaseException as error:
            ledger.wrong.append(f"a thread ended with {type(error).__name__}: {error}")
            raise

    return call


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_a_storm_of_threads_and_tasks(llm, asks):
    ledger = Ledger(asks)
    deadline = time.monotonic() + SECONDS
    threads = [
        threading.Thread(target=kept(ledger, lambda: in_a_thread(llm, ledger)), daemon=True) for _ in range(CALLERS)
    ]

    async def tasks() -> None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(in_a_task(llm, ledger) for _ in range(CALLERS)))

    for thread in threads:
        thread.start()
    asyncio.run(tasks())
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread still waits for its answer"
    assert ledger.wrong == []
    assert sorted(ledger.outcomes) == list(range(REQUESTS))
    counts = Counter(ledger.outcomes.values())
    assert counts["answered"] > REQUESTS // 2
    assert counts["left"] > 15
    assert counts["cancelled"] > 6
    while llm.pool.used_blocks and time.monotonic() < deadline:  # what was cancelled last is still being given back
        time.sleep(0.01)
    assert llm.pool.used_blocks == 0
    (after,) = llm.generate(asks[0].ids, asks[0].params, policy=asks[0].policy)
    assert after.outputs[0].token_ids == asks[0].answer
