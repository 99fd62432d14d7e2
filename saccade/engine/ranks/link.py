"""The first rank's side of an engine's other ranks: their processes, the messages to them, and the end of all.

Messages are pickled and go to the other ranks' standard input; what joins tensors is engine/ranks/meeting.py's.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from saccade.engine.ranks.folder import RankFolder, counts_path, failed, ready, steps_path
from saccade.engine.ranks.meeting import CPU, Group, RankGroup
from saccade.engine.ranks.reduce import Alone
from saccade.engine.ranks.watch import RankWatch, SumCounts
from saccade.errors import EngineLost, brief

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 60.0  # that a rank may come later to a sum than another
HANG_SECONDS = 6.0  # that a rank which is waited for may use no processor: the engine ends within 10, if hosts are busy
DYING_SECONDS = 1.0  # after its connections have broken, that a process takes to be known as dead
START_SECONDS = 600.0  # to load a model
COMPILE_SECONDS = 900.0  # that a rank with a GPU may come later: it may compile what others have compiled


class RanksLost(EngineLost):
    """A rank that died, does not answer or is out of step. No request of its engine can go on."""


class RankLink:
    """The first rank's hold on the others, one process each, which end with it."""

    alone = False  # whether there are no others

    def __init__(self, ranks: int, device: torch.device = CPU) -> None:
        self.ranks, self.device = ranks, device
        self.lost: RanksLost | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._group: Group | None = None
        self._folder = RankFolder()
        self._store = distributed.FileStore(str(self.store_path), ranks)
        self._counts = SumCounts(counts_path(self.store_path), ranks)
        self._steps = SumCounts(steps_path(self.store_path), ranks)
        self._watch: RankWatch | None = None
        self._losing = threading.RLock()
        self._finalizer = weakref.finalize(self, _end, self.processes, self._folder.remove)

    @property
    def store_path(self) -> Path:
        """Where ranks find each other; only this user can read it."""
        return self._folder.store

    def join(self) -> None:
        """Wait until the other ranks have loaded their models. RanksLost, which names the error, where one fails."""
        until = time.monotonic() + START_SECONDS
        for rank, process in enumerate(self.processes, 1):
            while not self._store.check([ready(rank)]):
                if self._store.check([failed(rank)]):
                    raise self._end_all(f"rank {rank} of {self.ranks}: {self._store.get(failed(rank)).decode()}")
                if process.poll() is not None or time.monotonic() > until:
                    raise self.lose(None)
                time.sleep(0.01)
        try:
            self._group = self._met()
        except RuntimeError as error:
            raise self.lose(error) from error
        link = weakref.ref(self)  # which its watch does not keep

        def found(rank: int, why: str) -> None:
            if (own := link()) is not None:
                own._lose_rank(rank, why)

        self._watch = RankWatch(self._counts, self._steps, self.processes, HANG_SECONDS, found)

    def _met(self) -> Group:
        seconds = patience(self.device)
        return RankGroup(self._store, 0, self.ranks, seconds, self._counts, self.device, self.store_path.parent.name)

    def in_step(self) -> AbstractContextManager[None]:
        """The first rank is in a step: it waits for its device there, which may wait for other ranks."""
        return self._steps.within(0)

    def tell(self, message: Any) -> None:
        """Send a message to all other ranks. RanksLost where one is gone."""
        self.tell_each([message] * len(self.processes))

    def decide(self, decision: Any) -> None:
        """Send a decision, for which the others wait within a step. It counts as a sum does, by which they keep pace.
        RanksLost where one is gone."""
        with self._counts.within(0):
            self.tell(decision)

    def tell_each(self, messages: Sequence[Any]) -> None:
        """Send each other rank a message of its own. RanksLost where one is gone."""
        if self.lost is None:
            try:
                for process, message in zip(self.processes, messages):
                    send(process, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
            except BaseException as error:  # of an interrupt, too, half a message may be left
                self.lose(error)
                if not isinstance(error, OSError):
                    raise
        if self.lost is not None:
            raise RanksLost(str(self.lost))

    @property
    def group(self) -> Group:
        """RanksLost where there is none any more."""
        if self.lost is not None or self._group is None:
            raise RanksLost(str(self.lost or "the other ranks have not begun"))
        return self._group

    def gather(self, name: tuple[int, ...], own: Tensor) -> list[Tensor]:
        """See ``gather_named``; where it fails the others are given up."""
        try:
            return gather_named(self.group, name, own)
        except RuntimeError as error:
            raise self.lose(error) from error

    def joined(self) -> Group:
        """See ``group``."""
        return self.group

    def hangs_after(self, seconds: float) -> None:
        """Let a rank hang for no longer than ``seconds``."""
        if self._watch is not None:
            self._watch.seconds = seconds

    def lose(self, error: BaseException | None) -> RanksLost:
        """Give the other ranks up, after ``error`` in this one: what is to be said of it."""
        if (known := self.lost) is not None:  # those that wait need not until all processes have ended
            return known
        with self._losing:
            if self.lost is not None:
                return self.lost
            until = time.monotonic() + DYING_SECONDS
            while self.processes and time.monotonic() < until:
                ended = [rank for rank, process in enumerate(self.processes, 1) if process.poll() is not None]
                if ended:  # those that a lost connection ended have left no words
                    rank = next((one for one in ended if self._words(one)), ended[0])
                    code = self.processes[rank - 1].poll()
                    return self._end_all(
                        f"rank {rank} of {self.ranks} ended by itself, with exit code {code}{self._words(rank)}"
                    )
                time.sleep(0.02)
            what = "they did not begin in time" if error is None else f"{type(error).__name__}: {brief(error)}"
            return self._end_all(f"the {self.ranks} ranks are out of step: {what}")

    def _lose_rank(self, rank: int, why: str) -> None:
        """Give all up, since one of them ``why``: what waits for it goes on with an error."""
        with self._losing:
            if self.lost is None:
                self.processes[rank - 1].kill()
                self._end_all(f"rank {rank} of {self.ranks} {why}{self._words(rank)}")

    def _words(self, rank: int) -> str:
        """What a rank has said of its end, such as that there is no memory."""
        with suppress(RuntimeError):
            if self._store.check([failed(rank)]):
                return f": {self._store.get(failed(rank)).decode()}"
        return ""

    def _end_all(self, why: str) -> RanksLost:
        self.lost = RanksLost(f"{why}; no request can go on: close this engine and begin another")
        logger.error("%s", str(self.lost))  # a record that is kept would keep what raises it
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()
        for process in self.processes:  # which may wait for each other, and hold nothing that is to be kept
            process.kill()
        self._finalizer()
        return self.lost

    def close(self) -> None:
        """End the other ranks."""
        with self._losing:
            if self.lost is None:
                self.lost = RanksLost("the engine was closed")
            if self._watch is not None:
                self._watch.close()
            if self._group is not None:
                self._group.abort()
        self._finalizer()


class LoneLink(RankLink):
    """The first rank's without the others: it runs its part of the model, whose results mean nothing."""

    alone = True

    def _met(self) -> Group:
        return Alone(self.ranks)


def patience(device: torch.device) -> float:
    """Seconds that a rank on ``device`` waits on its host for another one that gets on."""
    return ANSWER_SECONDS if device.type == "cpu" else COMPILE_SECONDS


def gather_named(group: Group, name: tuple[int, ...], own: Tensor) -> list[Tensor]:
    """All ranks' parts of what ``name`` names. RuntimeError where another rank asks for something else: one whose rows
    of a request failed goes on with the next."""
    asked = torch.tensor([*name, *own.shape], dtype=torch.int64, device="cpu")
    for other in group.gather(asked):
        if not torch.equal(other, asked):
            raise RuntimeError(f"ranks disagree on what to gather: one has {asked.tolist()}, another {other.tolist()}")
    return group.gather(own)


def send(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Write to a rank's input. OSError where it has ended, or reads nothing for ``ANSWER_SECONDS``."""
    assert process.stdin is not None
    pipe, left = process.stdin.fileno(), memoryview(data)
    os.set_blocking(pipe, False)
    while left:
        if not select.select([], [pipe], [], ANSWER_SECONDS)[1]:
            raise TimeoutError(f"a rank has read nothing for {ANSWER_SECONDS:g} seconds")
        left = left[os.write(pipe, left) :]


def _end(processes: list[subprocess.Popen[bytes]], remove: Callable[[], None]) -> None:
    """A rank ends at the end of its input; one that does not is killed. ``remove`` what they shared then."""
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    for process in processes:
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    remove()
