"""Answering samples one after the other, or in several processes; answers come in the samples' order either way."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from saccade.engine.config import EngineConfig
from saccade.errors import RequestError
from saccade.eval.answer import answer
from saccade.eval.samples import Sample
from saccade.eval.setting import Setting, load
from saccade.llm import LLM

Answer = tuple[dict[str, Any], dict[str, float]]
_AHEAD = 3  # samples given out per worker: enough that none waits for a slow neighbour, few enough to hold in memory


def answers_in_order(
    samples: Sequence[Sample], llm: LLM, model: EngineConfig, setting: Setting, workers: int = 1
) -> Iterator[Answer]:
    """``answer`` of each sample. With more than one worker each process loads ``model`` for itself; samples share
    nothing, so the answers are the same. Raises RequestError for ``workers`` below 1."""
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise RequestError(f"workers={workers!r} must be an integer >= 1")
    if workers == 1 or len(samples) < 2:
        yield from (answer(llm, sample, setting) for sample in samples)
        return
    # The same rounding as here: sums depend on how many threads share them.
    alike = replace(model, threads=model.threads or _threads())
    context = multiprocessing.get_context("spawn")
    begin = (alike, os.getpid())
    with ProcessPoolExecutor(min(workers, len(samples)), context, initializer=_begin, initargs=begin) as pool:
        given: deque[Future[Answer]] = deque()
        try:
            for sample in samples:
                given.append(pool.submit(_answer, sample, setting))
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


def _answer(sample: Sample, setting: Setting) -> Answer:
    assert _llm is not None
    return answer(_llm, sample, setting)


def _threads() -> int:
    import torch

    return torch.get_num_threads()
