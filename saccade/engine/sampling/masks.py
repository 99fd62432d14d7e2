"""Masks of constrained answers, computed on threads of their own while the engine goes on with the other requests.

After each token the next mask is begun. A step waits for those that were begun a moment ago, and leaves out the
requests whose masks are not there by then: a slow constraint holds up its own answer alone. An answer whose constraint
takes more than ``grammar_seconds`` in all ends with an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from torch import Tensor

from saccade.errors import RequestError

THREADS = 4  # one may be slow, and the others' masks come nevertheless
STACK = 64 << 20  # bytes of each: grammars are read by functions that call themselves
FRESH = 0.005  # seconds that a step waits for a mask from its beginning on, at most
MOMENT = 0.01  # seconds that an engine with nothing else to do waits before it looks for letters again

T = TypeVar("T")


class Matcher(Protocol):
    """Follows one answer along its constraint. One thread at a time calls it, and not the engine's where masks take
    long (this module)."""

    def allowed(self, answer: Sequence[int]) -> Tensor:
        """Which tokens may come after ``answer``, the tokens of the answer so far: bool [vocab], of the model's own
        vocabulary. What it raises ends the request with that error."""
        ...

    def accepts(self, answer: Sequence[int]) -> bool:
        """Whether ``answer``, without a token that ends it, may end there."""
        ...


class Following:
    """One answer's ``matcher``. ``seconds``: that it took so far. ``owner``: the request, once there is
    one; this module does not look into it."""

    def __init__(self, matcher: Matcher, masks: Masks) -> None:
        self.matcher, self.masks = matcher, masks
        self.owner: object | None = None
        self.seconds = 0.0
        self._began: float | None = None
        self._mask: Future[Tensor] | None = None
        self._length = -1

    def ahead(self, answer: Sequence[int]) -> None:
        """Begin the mask of what may come after ``answer``."""
        self._length = len(answer)
        self._mask = self.masks.begin(self, lambda: self._timed(lambda: self.matcher.allowed(answer)))

    @property
    def ready(self) -> bool:
        """Whether no mask is under way."""
        return self._mask is None or self._mask.done()

    def comes(self) -> bool:
        """:attr:`ready`, at once or in a moment."""
        if self._mask is not None and not self._mask.done():
            wait([self._mask], FRESH)
        return self.ready

    def allowed(self, answer: Sequence[int]) -> Tensor:
        """What may come after ``answer``: bool [vocab]. Waits for it. Raises what the matcher raises, and RequestError
        once it has taken too long."""
        mask, self._mask = self._mask, None
        if mask is None or self._length != len(answer):
            found = self._timed(lambda: self.matcher.allowed(answer))
        else:
            found = mask.result()
        if self.overdue:
            raise self.too_slow()
        return found

    def accepts(self, answer: Sequence[int]) -> bool:
        """Whether ``answer`` may end there."""
        return self._timed(lambda: self.matcher.accepts(answer))

    @property
    def overdue(self) -> bool:
        """Whether it has taken too long, what is under way included."""
        began, limit = self._began, self.masks.seconds
        return self.seconds + (0.0 if began is None else time.perf_counter() - began) > limit

    def too_slow(self) -> RequestError:
        name = getattr(self.matcher, "name", "the constraint")
        return RequestError(
            f"{name} took more than grammar_seconds={self.masks.seconds:g} to follow over this answer; make it simpler "
            "(fewer alternatives that read alike, no repetition of repetitions), ask for fewer tokens, or raise it"
        )

    def end(self) -> None:
        """No more masks are wanted."""
        if self._mask is not None:
            self._mask.cancel()
        self.masks.forget(self)

    def _timed(self, call: Callable[[], T]) -> T:
        self._began = began = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - began
            self._began = None


class Masks:
    """Those under way. ``seconds``: the most that an answer's may take in all."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[Following, tuple[Future[Any], float]] = {}

    def begin(self, following: Following, work: Callable[[], Tensor]) -> Future[Tensor]:
        if self._pool is None:
            self._pool = _threads()
        mask = self._pool.submit(work)
        self._begun[following] = mask, time.perf_counter()
        return mask

    def settle(self) -> None:
        """Wait for those that were begun a moment ago."""
        for following, (mask, began) in list(self._begun.items()):
            if not mask.done():
                wait([mask], max(0.0, began + FRESH - time.perf_counter()))
            if mask.done():
                self._begun.pop(following, None)

    def wait(self) -> None:
        """Wait until one is there, a moment at most; not at all where none is under way."""
        if self._begun:
            wait([mask for mask, _ in self._begun.values()], MOMENT, FIRST_COMPLETED)

    def overdue(self) -> list[Following]:
        """Those under way that have taken too long."""
        return [following for following in self._begun if following.overdue]

    def forget(self, following: Following) -> None:
        self._begun.pop(following, None)

    def close(self) -> None:
        """End the threads, each with the mask that it computes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _threads() -> ThreadPoolExecutor:
    """All threads at once: the size of a stack is a setting of those that begin."""
    pool, all_there = ThreadPoolExecutor(THREADS, "saccade-masks"), threading.Barrier(THREADS)
    before = threading.stack_size(STACK)
    try:
        wait([pool.submit(all_there.wait) for _ in range(THREADS)])
    finally:
        threading.stack_size(before)
    return pool
