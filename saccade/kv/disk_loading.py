"""Reads of the disk tier under way: all at once, or in turns that can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from saccade.kv.tier import Part, TierCounts

Run = list[tuple[Part, int, int]]  # neighbours in the file: parts, their cells and slots


class DiskLoading:
    """Reads under way (see tier.Loading)."""

    def __init__(self, counts: TierCounts, jobs: list[tuple[list[int], Callable[[], list[int]]]]) -> None:
        self._counts, self._jobs = counts, jobs

    def wait(self) -> list[int]:
        began, failed = time.perf_counter(), []
        for which, job in self._jobs:
            try:
                failed += [which[i] for i in job()]
            except Exception:  # out of memory, say: nothing is known of these
                failed += which
        self._jobs = []
        self._counts.wait_seconds += time.perf_counter() - began
        return failed


class DiskTurns:
    """The same, in turns that can be stopped; ``read`` reads a run and gives the numbers in it of those that failed;
    ``skipped``: those that did not come because they were stopped."""

    def __init__(
        self, counts: TierCounts, read: Callable[[Run], list[int]], arrived: Callable[[list[int]], None]
    ) -> None:
        self._counts, self._read_run, self._arrived, self._stopped = counts, read, arrived, False
        self._jobs: list[tuple[list[int], Future[None]]] = []
        self._failed: list[int] = []
        self.skipped: list[int] = []

    def add(self, pool: ThreadPoolExecutor, runs: list[tuple[list[int], Run]]) -> None:
        """Neighbours in the file, by the numbers of the parts, that one thread reads after those added before."""
        self._jobs.append(([one for which, _ in runs for one in which], pool.submit(self._read, runs)))

    def stop(self) -> None:
        """What has not begun is not to be read any more."""
        self._stopped = True
        for which, job in reversed(self._jobs):
            if job.cancel():
                self._arrived(which)

    def wait(self) -> list[int]:
        """See tier.Loading."""
        began = time.perf_counter()
        for which, job in self._jobs:
            try:
                job.result()
            except CancelledError:
                self.skipped += which
            except Exception:  # out of memory, say: nothing is known of these
                self._failed += which
        self._jobs = []
        self._counts.wait_seconds += time.perf_counter() - began
        return sorted(set(self._failed) - set(self.skipped))

    def _read(self, runs: list[tuple[list[int], Run]]) -> None:
        left = [one for which, _ in runs for one in which]
        try:
            for which, own in runs:
                if self._stopped:
                    self.skipped += left
                    return
                self._failed += [which[i] for i in self._read_run(own)]
                del left[: len(which)]
                self._arrived(which)
        finally:
            self._arrived(left)
