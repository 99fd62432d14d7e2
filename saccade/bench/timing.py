"""Timing in process: warm up, repeat, take the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

ENOUGH_SECONDS = 20.0  # a measurement stops here even if it has fewer repeats than asked for, but never below three


def median_ms(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Median milliseconds over ``repeats`` calls, taken from ``calls`` in turn (several copies of the data keep caches
    cold). One call warms up; long measurements stop after ``ENOUGH_SECONDS`` with at least three repeats."""
    calls[-1]()
    taken: list[float] = []
    for repeat in range(max(3, repeats)):
        call = calls[repeat % len(calls)]
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
        if repeat >= 2 and sum(taken) > ENOUGH_SECONDS:
            break
    return 1000 * statistics.median(taken)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Run torch with so many threads, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
