"""Work on a model one item after the other, in several processes, or many samples in one model's steps; results come in
the items' order every way."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError, SaccadeError
from saccade.eval.answer import answer, answer_aloud, quietly
from saccade.eval.samples import Sample
from saccade.eval.setting import Setting, load
from saccade.llm import LLM

Answer = tuple[dict[str, Any], dict[str, float]]
Item = TypeVar("Item")
Result = TypeVar("Result")
_AGAIN = 0.1  # seconds after which what has begun meanwhile is ended, too
_AHEAD = 3  # samples given out per worker: enough that none waits for a slow neighbour, few enough to hold in memory


def answers_in_order(
    samples: Sequence[Sample],
    llm: LLM,
    model: EngineConfig,
    setting: Setting,
    workers: int = 1,
    together: int = 1,
    until: float | None = None,
) -> Iterator[Answer]:
    """``answer`` of each sample. With more than one worker each process loads ``model`` for itself; samples share
    nothing, so the answers are the same. ``together``: samples that ``llm`` answers at once, their decode rows in
    shared steps, which is what a GPU is good at; such rows round as their step does. ``until``, on ``monotonic``'s
    clock: when everything that ``llm`` runs is ended, and no more answers come. Raises RequestError as ``one_way``."""
    one_way(workers, together, until)
    if together == 1:
        answers = in_order(partial(_answer, setting=setting), samples, llm, model, workers)
    else:
        answers = _at_once(samples, llm, setting, together)
    if until is None:
        yield from answers
        return
    with _ended_at(until, llm) as ended, closing(answers):
        for one in answers:
            if ended.is_set():
                return  # it may have been ended itself
            yield one


def _at_once(samples: Sequence[Sample], llm: LLM, setting: Setting, together: int) -> Generator[Answer, None, None]:
    with quietly():
        work = partial(_aloud, llm=llm, setting=setting)
        yield from _ordered(ThreadPoolExecutor(together), work, samples, 2 * together)


@contextmanager
def _ended_at(until: float, llm: LLM) -> Iterator[threading.Event]:
    """From ``until`` on cancel what ``llm`` runs, again and again until the block is left; the event is set before."""
    ended, left = threading.Event(), threading.Event()

    def end() -> None:
        if left.wait(max(0.0, until - time.monotonic())):
            return
        ended.set()
        while True:
            with suppress(SaccadeError):  # an engine that broke ends what runs by itself
                llm.loop.cancel_all()
            if left.wait(_AGAIN):
                return

    thread = threading.Thread(target=end, name="saccade-eval-until", daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        left.set()
        thread.join()


def in_order(
    work: Callable[[LLM, Item], Result],
    items: Sequence[Item],
    llm: LLM,
    model: EngineConfig,
    workers: int = 1,
    together: int = 1,
) -> Generator[Result, None, None]:
    """``work(llm, item)`` of each item, in order. ``work`` and items must pickle where there are ``workers``; each
    loads ``model`` for itself, with room for ``together`` samples at once. Raises RequestError for ``workers`` below 1,
    and what ``work`` raises."""
    positive("workers", workers)
    if workers == 1 or len(items) < 2:
        yield from (work(llm, item) for item in items)
        return
    # The same rounding as here: sums depend on how many threads share them.
    alike = replace(model, threads=model.threads or _threads())
    context = multiprocessing.get_context("spawn")
    begin = (alike, os.getpid(), together)
    pool = ProcessPoolExecutor(min(workers, len(items)), context, initializer=_begin, initargs=begin)
    yield from _ordered(pool, partial(_do, work), items, _AHEAD * workers)


def one_way(workers: int, together: int, until: float | None = None) -> None:
    """RequestError for ``workers`` or ``together`` below 1, both above, or ``workers`` above 1 and ``until``."""
    positive("workers", workers)
    positive("together", together)
    if workers != 1 and (together != 1 or until is not None):
        other = f"together={together!r}: samples of a setting take one way" if together != 1 else f"until={until!r}"
        raise RequestError(f"workers={workers!r} and {other}, not both")


def positive(name: str, value: int) -> None:
    """RequestError unless ``value`` is an integer from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{name}={value!r} must be an integer >= 1")


def _ordered(pool: Executor, work: Callable[[Item], Result], items: Sequence[Item], ahead: int) -> Iterator[Result]:
    """``work`` of each item in ``pool``, at most ``ahead`` given out at once. Where the reader leaves early, what was
    begun still ends and the rest is dropped."""
    with pool:
        given: deque[Future[Result]] = deque()
        try:
            for item in items:
                given.append(pool.submit(work, item))
                if len(given) == ahead:
                    yield given.popleft().result()
            while given:
                yield given.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_llm: LLM | None = None  # a worker's own


def _begin(model: EngineConfig, parent: int, together: int) -> None:
    global _llm
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    _llm = load(model, together)


def _follow(parent: int) -> None:
    """End with the parent, even where it was killed and could not say so."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _do(work: Callable[[LLM, Item], Result], item: Item) -> Result:
    assert _llm is not None
    return work(_llm, item)


def _answer(llm: LLM, sample: Sample, setting: Setting) -> Answer:
    return answer(llm, sample, setting)


def _aloud(sample: Sample, llm: LLM, setting: Setting) -> Answer:
    return answer_aloud(llm, sample, setting)


def _threads() -> int:
    import torch

    return torch.get_num_threads()
