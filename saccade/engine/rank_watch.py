"""Which rank does not get on, as the first one sees it: in a file that they share each counts the sums it comes to."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

WORD = 8  # bytes of a count
LOOK_SECONDS = 0.5


class Process(Protocol):
    """A rank's process, as subprocess has it."""

    @property
    def pid(self) -> int:
        """Of the system."""

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""


class SumCounts:
    """How many sums each of ``ranks`` ranks has come to, in a file at ``path`` that all of them open."""

    def __init__(self, path: Path, ranks: int) -> None:
        with path.open("a+b") as file:
            file.truncate(ranks * WORD)
            self._begun = memoryview(mmap.mmap(file.fileno(), ranks * WORD)).cast("q")

    def add(self, rank: int) -> None:
        """``rank`` has come to one more."""
        self._begun[rank] += 1

    def late(self) -> list[int]:
        """The ranks that have not come to a sum in which the first one waits."""
        first, *others = self._begun
        return [rank for rank, count in enumerate(others, 1) if count < first]


class RankWatch:
    """A thread that calls ``found(rank, why)``, once, for a rank of ``processes`` that ended by itself, or for which
    the first rank waits while it has not used a processor for ``seconds``. One that computes may take its time.

    Where the system does not say what processor time a process has used (it does under Linux), only ends are found.
    """

    def __init__(
        self, counts: SumCounts, processes: Sequence[Process], seconds: float, found: Callable[[int, str], None]
    ) -> None:
        self._counts, self._processes, self.seconds, self._found = counts, processes, seconds, found
        self._over = threading.Event()
        self._still: dict[int, tuple[float | None, float]] = {}  # by rank: processor seconds, and since when
        threading.Thread(target=self._look, name="saccade-ranks", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(min(LOOK_SECONDS, self.seconds / 4)):
            late, now = self._counts.late(), time.monotonic()
            for rank, process in enumerate(self._processes, 1):
                if (code := process.poll()) is not None:
                    return self._found(rank, f"ended by itself, with exit code {code}")
                used = processor_seconds(process.pid) if rank in late else None
                before, since = self._still.get(rank, (None, now))
                if used is None or used != before:
                    self._still[rank] = used, now
                elif now - since >= self.seconds:
                    return self._found(rank, f"hangs: it used no processor for {now - since:.0f} s, and was waited for")


def processor_seconds(pid: int) -> float | None:
    """Clock ticks of processor time that a process and its threads have used; None where the system does not say."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return float(words[11]) + float(words[12])  # utime and stime, proc(5)
