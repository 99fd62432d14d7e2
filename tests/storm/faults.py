"""Exceptions planted where an engine works: each has a number, so that whoever is hit by one can be told."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from saccade.engine.rows import calls as host_calls
from saccade.engine.rows.attention import RowAttention
from saccade.engine.rows.decode_rows import JoinedRows
from saccade.engine.sampling.sampler import Sampler
from saccade.engine.watch.report import Report
from saccade.engine.worker import Worker
from saccade.errors import CapacityError
from saccade.kv import BlockManager, SequenceKV
from saccade.kv.state_journal import StateJournal
from saccade.kv.states import StatePool
from saccade.methods.history import StateHistory
from saccade.methods.outside import load_outside
from saccade.methods.registry import KNOWN
from saccade.models.keeping import _Pieces
from saccade.models.tokenizer import TextStream
from saccade.ops import cpu, cpu_plans

KINDS = (RuntimeError, MemoryError, ValueError, CapacityError, IndexError)
TAKING = ("allocate", "take")  # which take nothing where they fail
HOOKS = ("select_prefill", "select_decode", "begin", "observe", "watch")
_NUMBER = re.compile(r"planted (\d+)")


class Faults:
    """Raises in one call of ``1 / rate``, before or after the call did its work. ``fired``: where each came up."""

    def __init__(self, seed: int, runner: Any, rate: float = 1.0) -> None:
        self.rng, self.rate, self.runner = random.Random(seed), rate, runner
        self.fired: dict[int, str] = {}
        self.errors: dict[int, list[str]] = {}  # by number, the requests that named it
        self.lock = threading.Lock()

    @contextmanager
    def planted(self) -> Iterator[None]:
        """While this lasts, places fail now and then."""
        with pytest.MonkeyPatch.context() as patch:
            for place, owner, name, share in places(self.runner):
                patch.setattr(owner, name, self._failing(place, name, getattr(owner, name), share))
            yield

    def blame(self, request: str, error: object) -> str | None:
        """Note that ``request`` ended with ``error``; what is wrong with that, if anything is."""
        found = _NUMBER.search(str(error))
        if found is None:
            return f"{request} ended with {type(error).__name__}: {error}"
        with self.lock:
            self.errors.setdefault(int(found[1]), []).append(request)
        return None

    def unjust(self) -> list[str]:
        """Faults that more than one request suffered from, and such as never came up."""
        return [
            f"fault {number} ({self.fired.get(number, 'never planted')}) hit {', '.join(requests)}"
            for number, requests in self.errors.items()
            if len(requests) > 1 or number not in self.fired
        ]

    def _failing(self, place: str, name: str, real: Callable[..., Any], share: float) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self.lock:
                chance = self.rng.random()
                late = self.rng.random() < 0.5
                kind = self.rng.choice(KINDS)
            if chance >= share * self.rate:
                return real(*args, **options)
            if late and name not in TAKING:
                real(*args, **options)
            if place == "kernel" and cpu.available() and kind is MemoryError:
                _kernel_without_memory()
            with self.lock:
                number = len(self.fired)
                self.fired[number] = f"{place}: {getattr(real, '__qualname__', real)}"
            raise kind(f"planted {number} in {place}")

        return call


def places(runner: Any) -> Iterator[tuple[str, Any, str, float]]:
    """Where something may fail: what a place is called, its owner and name, and the share of its calls that fail."""
    yield "allocation", BlockManager, "allocate", 0.04
    yield "allocation", BlockManager, "copy", 0.08
    yield "allocation", SequenceKV, "append", 0.002
    yield "kernel", host_calls, "run_call", 0.004
    if cpu.available():
        yield "kernel", cpu_plans.PlannedRows, "run", 0.004
        yield "kernel", cpu_plans.PlannedRows, "run_layers", 0.008
    yield "layer loop", RowAttention, "run", 0.004
    yield "layer loop", JoinedRows, "run", 0.004
    yield "layer loop", JoinedRows, "run_layers", 0.008
    yield "layer loop", runner, "steps", 0.008
    yield "learning", host_calls, "follow_prefill", 0.002
    yield "learning", StateHistory, "mark_layer", 0.002
    yield "step", Worker, "run", 0.008
    yield "slice", Worker, "advance", 0.004
    yield "settling", Report, "take", 0.004
    yield "choice", Sampler, "sample", 0.008
    yield "choice", TextStream, "step", 0.004
    if getattr(runner, "keeping", None) is not None:
        yield "states", StatePool, "take", 0.008
        yield "states", StateJournal, "run", 0.02
        yield "layer loop", _Pieces, "run", 0.002
    load_outside()
    for cls in sorted(set(KNOWN.values()), key=lambda one: one.__name__):
        for hook in HOOKS:
            if hook in vars(cls):
                yield "hook", cls, hook, 0.004


class Plant:
    """Counts calls by place while it is ``grown``. ``due``: by place, the number of the call that fails, whether it
    fails after its work, and how."""

    def __init__(self, runner: Any) -> None:
        self._places = [(_called(place, owner, name), owner, name) for place, owner, name, _ in places(runner)]
        self.calls: Counter[str] = Counter()
        self.due: dict[str, tuple[int, bool, type[Exception]]] = {}
        self.fired: list[str] = []

    @contextmanager
    def grown(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for place, owner, name in self._places:
                patch.setattr(owner, name, self._failing(place, getattr(owner, name)))
            yield

    def reset(self, due: dict[str, tuple[int, bool, type[Exception]]] | None = None) -> None:
        self.calls, self.due, self.fired = Counter(), due or {}, []

    def _failing(self, place: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls[place] += 1
            number, late, kind = self.due.get(place, (0, False, RuntimeError))
            if self.calls[place] != number:
                return real(*args, **options)
            if late and place.rpartition(".")[2] not in TAKING:
                real(*args, **options)
            self.fired.append(f"{place} {number}")
            raise kind(f"planted in {place} {number}")

        return call


def _called(place: str, owner: Any, name: str) -> str:
    return f"{place}: {owner.__name__ if isinstance(owner, type) else type(owner).__name__}.{name}"


def _kernel_without_memory() -> None:
    """The C++ kernels run out of memory on one of their own threads, and come to themselves again."""
    from saccade import _kernels

    with pytest.raises(MemoryError):
        _kernels.memory_fault(count=8, threads=2, in_worker=True)
