"""Work on a model one item after the other, or in several processes; results come in the items' order either way."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from saccade.engine.config import EngineConfig
from saccade.errors import RequestError
from saccade.eval.answer import answer
from saccade.eval.samples import Sample
from saccade.eval.setting import Setting, load
from saccade.llm import LLM

Answer = tuple[dict[str, Any], dict[str, float]]
Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD = 3  # samples given out per worker: enough that none waits for a slow neighbour, few enough to hold in memory


def answers_in_order(
    samples: Sequence[Sample], llm: LLM, model: EngineConfig, setting: Setting, workers: int = 1
) -> Iterator[Answer]:
    """``answer`` of each sample. With more than one worker each process loads ``model`` for itself; samples share
    nothing, so the answers are the same. Raises RequestError for ``workers`` below 1."""
    return in_order(partial(_answer, setting=setting), samples, llm, model, workers)


def in_order(
    work: Callable[[LLM, Item], Result], items: Sequence[Item], llm: LLM, model: EngineConfig, workers: int = 1
) -> Iterator[Result]:
    """``work(llm, item)`` of each item, in order. ``work`` and items must pickle where there are ``workers``; each
    loads ``model`` for itself. Raises RequestError for ``workers`` below 1, and what ``work`` raises."""
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise RequestError(f"workers={workers!r} must be an integer >= 1")
    if workers == 1 or len(items) < 2:
        yield from (work(llm, item) for item in items)
        return
    # The same rounding as here: sums depend on how many threads share them.
    alike = replace(model, threads=model.threads or _threads())
    context = multiprocessing.get_context("spawn")
    begin = (alike, os.getpid())
    with ProcessPoolExecutor(min(workers, len(items)), context, initializer=_begin, initargs=begin) as pool:
        given: deque[Future[Result]] = deque()
        try:
            for item in items:
                given.append(pool.submit(_do, work, item))
                if len(given) == _AHEAD * workers:
                    yield given.popleft().result()
            while given:
                yield given.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_llm: LLM | None = None  # a worker's own


def _begin(model: EngineConfig, parent: int) -> None:
    global _llm
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    _llm = load(model)


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


def _threads() -> int:
    import torch

    return torch.get_num_threads()
