"""Finding the rank that hangs, from the first rank: each rank counts the sums and decisions that it has reached in a
file that all share."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

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
    """How often each of ``ranks`` ranks has begun or ended a sum, or a decision of the first rank (leads.py), in a file
    at ``path`` that all of them open. All ranks come to the same ones in the same order."""

    def __init__(self, path: Path, ranks: int) -> None:
        with path.open("a+b") as file:
            file.truncate(ranks * WORD)
            self._counts = memoryview(mmap.mmap(file.fileno(), ranks * WORD)).cast("q")

    @contextmanager
    def within(self, rank: int) -> Iterator[None]:
        """``rank`` is in a sum."""
        self._counts[rank] += 1
        yield
        self._counts[rank] += 1

    def awaited(self) -> tuple[int, list[int]]:
        """The first rank's count, and the ranks that keep it in a sum: those that have not come to it, or where all
        have, those that are in it too."""
        first, *others = self._counts
        late = [rank for rank, count in enumerate(others, 1) if count < first]
        within = [rank for rank, count in enumerate(others, 1) if count == first]
        return first, (late or within) if first % 2 else []

    def waits(self, rank: int) -> bool:
        """Whether ``rank`` is in one that the first rank has not come to. In one that the first has left it is late: a
        part that it sent before it was stopped, say, is all that the first needed."""
        return bool(self._counts[rank] % 2) and self._counts[rank] > self._counts[0]


class RankWatch:
    """A thread that calls ``found(rank, why)``, once, for a rank of ``processes`` that ended by itself, or for which
    the first rank waits while it has not used a processor for ``seconds``: in a sum on the host (``counts``), or in a
    step (``steps``), where devices wait for each other and hosts use a processor for that. A rank that computes, or
    waits for the first, may take its time.

    Where the system does not say what processor time a process has used (it does under Linux), only ends are found.
    """

    def __init__(
        self,
        counts: SumCounts,
        steps: SumCounts,
        processes: Sequence[Process],
        seconds: float,
        found: Callable[[int, str], None],
    ) -> None:
        self._counts, self._steps, self._processes = counts, steps, processes
        self.seconds, self._found = seconds, found
        self._over = threading.Event()
        self._still: dict[
            int, tuple[tuple[tuple[int, int], Activity], float]
        ] = {}  # by rank: what it was, and since when
        threading.Thread(target=self._look, name="saccade-ranks", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(min(LOOK_SECONDS, self.seconds / 4)):
            (count, awaited), now, still = self._awaited(), time.monotonic(), dict(self._still)
            self._still.clear()
            for rank, process in enumerate(self._processes, 1):
                if (code := process.poll()) is not None:
                    return self._found(rank, f"ended by itself, with exit code {code}")
                if rank in awaited and (active := activity(process.pid)) is not None:
                    before, since = still.get(rank, (None, now))
                    stays = before is not None and before[0] == count and active.like(before[1])
                    self._still[rank] = (count, active), since if stays else now
            hanging = [rank for rank, (_, since) in self._still.items() if now - since >= self.seconds]
            if hanging:  # of several that are in a sum, those that the system has stopped
                worst = max(hanging, key=lambda rank: self._still[rank][0][1].stopped)
                why = f"hangs: it used no processor for {now - self._still[worst][1]:.0f} s, and was waited for"
                return self._found(worst, why)

    def _awaited(self) -> tuple[tuple[int, int], set[int]]:
        """Where the first rank is, and the ranks that it may wait for there."""
        sums, late = self._counts.awaited()
        steps, within = self._steps.awaited()
        return (sums, steps), {*late, *(rank for rank in within if not self._counts.waits(rank))}


class Activity(NamedTuple):
    """What the system says of a process: clock ``ticks`` of processor time that it and its threads have used."""

    ticks: int
    stopped: bool

    def like(self, before: Activity) -> bool:
        """Whether the process did nothing since ``before``. One that is stopped does nothing, whatever its children and
        what a sandbox counts for it say."""
        return self == before or (self.stopped and before.stopped)


def activity(pid: int) -> Activity | None:
    """None where the system does not say. A process uses what those do that it has started: compilers, say."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(words[11]) + int(words[12])  # utime and stime, state: proc(5)
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            started = [activity(int(child)) for child in path.read_text().split()]
            ticks += sum(one.ticks for one in started if one is not None)
    return Activity(ticks, words[0] in "Tt")
