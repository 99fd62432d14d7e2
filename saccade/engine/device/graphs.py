"""Recorded steps: how many are kept, how they are recorded and replayed, and what becomes of those that fail."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.device.attention import Group
from saccade.engine.device.tap import Tap
from saccade.ops.triton.common import pad

SHORTEST = 1024  # keys: rows of up to so many share their graphs
FINE = 1 << 16  # keys, above which lengths are rounded by less than to a power of two
MOST_GRAPHS = 64  # kept while they are used; the least recently used goes first
MOST_NEW = 16  # kinds kept that have no graph: those that come and go push no graphs out
COVERED = 4  # steps of a key that another one's recording serves, before it has one of its own
MOST_TIMES = 4  # as many groups, and as long rows, as such a recording has at most
MOST_FAILURES = 3  # of one key in a row, then it is not tried again
MOST_KEYS = 256  # whose failures are remembered
PAUSE = 256  # steps without a recording after one ran out of memory


def rounded_up(keys: int) -> int:
    """The ``longest`` of the key of steps whose longest row has ``keys`` keys: the next power of two, above FINE the
    next eighth of one. Grids, and what is searched, are as long; a row just above a power of two would have twice what
    it needs."""
    most = pad(keys, SHORTEST)
    return most if most <= FINE else -(-keys // (most // 16)) * (most // 16)


class Key(NamedTuple):
    """What a recording is good for: ``sizes``, the number of a form and how many rows it has, of each group; the
    ``longest`` row, in keys; whether KV blocks may be ``absent``, queries are ``tapped``, and the step is a
    ``prefill``."""

    sizes: tuple[tuple[int, int], ...]
    longest: int
    absent: bool = False
    tapped: bool = False
    prefill: bool = False

    @property
    def rows(self) -> int:
        """Of all groups."""
        return sum(count for _, count in self.sizes)

    def covers(self, other: Key) -> bool:
        """Whether steps of ``other`` fit into recordings of this key, which is not much larger."""
        rows = dict(self.sizes)
        return (
            self[2:] == other[2:]
            and other.longest <= self.longest <= MOST_TIMES * other.longest
            and len(rows) <= MOST_TIMES * len(other.sizes)
            and all(rows.get(form, 0) >= count for form, count in other.sizes)
        )


@dataclass(frozen=True)
class GraphStats:
    """``kinds`` of step are known, of at most ``most``, and ``recorded`` of them in graphs; ``bytes`` that these hold
    for their own tensors, None where that is not known."""

    kinds: int
    recorded: int
    most: int
    bytes: int | None


@dataclass(eq=False)
class StepKind:
    """All steps of one key: their groups, how many keys their rows have at most, and the graph once there is one."""

    groups: tuple[Group, ...]
    longest: int
    runs: int = 0
    records: bool = True
    graph: torch.cuda.CUDAGraph | None = None
    tap: Tap | None = None  # of what ran last, which replays write to
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    best: Tensor = field(default_factory=lambda: torch.empty(0))


class StepKinds:
    """The kinds of step that were run lately. A kind runs once as it is, which compiles its kernels, and from a
    recording afterwards, where ``records`` says so and the device can."""

    def __init__(self, device: torch.device, records: bool) -> None:
        self.device = device
        self.records = records and device.type == "cuda"
        self.fresh = False  # whether the last step was no replay although its kind will be replayed, or ran first
        self.note: str | None = None  # why some steps are not recorded although they should be
        self._kinds: OrderedDict[Key, StepKind] = OrderedDict()
        self._failed: OrderedDict[Key, tuple[int, str]] = OrderedDict()
        self._asked: OrderedDict[Key, int] = OrderedDict()  # steps that a key had no recording for
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._paused = 0

    @property
    def stats(self) -> GraphStats:
        recorded, _ = self.recorded
        held = None
        if self._pool is not None:
            segments = torch.cuda.memory_snapshot()
            held = sum(one["total_size"] for one in segments if one.get("segment_pool_id") == self._pool)
        return GraphStats(len(self._kinds), recorded, MOST_GRAPHS, held if recorded else 0)

    @property
    def recorded(self) -> tuple[int, int]:
        """How many kinds are recorded, and how many may be. For any thread."""
        return sum(kind.graph is not None for kind in list(self._kinds.values())), MOST_GRAPHS

    def of(self, key: Key, groups: tuple[Group, ...]) -> StepKind:
        """The kind of step with this key, whose rows are ``groups``."""
        if key not in self._kinds:
            for recorded, most in ((True, MOST_GRAPHS), (False, MOST_NEW - 1)):
                held = [other for other, kind in self._kinds.items() if (kind.graph is not None) == recorded]
                for other in held[: max(0, len(held) - most)]:
                    del self._kinds[other]
            self._kinds[key] = StepKind(groups, key.longest)
        self._kinds.move_to_end(key)
        return self._kinds[key]

    def cover(self, key: Key) -> tuple[Key, StepKind] | None:
        """A recorded kind among whose rows those of ``key`` find room, as padding has the others, with its own key;
        None where ``key`` has a recording or comes often enough to get one, and where no kind will do. While requests
        come and go, most keys come once or twice; a launch kernel by kernel takes several times as long as a replay."""
        own = self._kinds.get(key)
        if own is not None and own.graph is not None:
            return None
        times = self._asked.pop(key, 0) + 1
        self._asked[key] = times
        while len(self._asked) > MOST_KEYS:
            self._asked.popitem(last=False)
        if times > COVERED:
            return None
        found = [one for one in self._kinds.items() if one[1].graph is not None and one[0].covers(key)]
        return min(found, key=lambda one: (len(one[0].sizes), one[0].rows, one[0].longest), default=None)

    def clear(self, several: bool | None = None) -> None:
        """Forget all kinds with their graphs; or those whose rows have ``several`` tokens, or one, alone."""
        if several is not None:
            for key in [key for key, kind in self._kinds.items() if (kind.groups[0].each > 1) == several]:
                del self._kinds[key]
            return
        self._kinds.clear()
        self._pool = None

    def free(self) -> None:
        """Give back all memory that graphs hold, and record none for a while."""
        self.clear()
        self._paused = PAUSE
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def launch(self, kind: StepKind, forward: Callable[[], None], watched: bool) -> None:
        """Run one step: ``forward`` launches its kernels and leaves ``logits`` and ``best``. A step that is ``watched``
        is launched kernel by kernel."""
        self._paused = max(0, self._paused - 1)
        lasts = watched or not self.records or not kind.records  # kernel by kernel
        self.fresh = kind.runs == 0 if lasts else kind.graph is None
        here: AbstractContextManager[Any] = nullcontext() if self._stream is None else torch.cuda.device(self.device)
        with here:
            if watched or self._stream is None or not self.records:
                self._on_stream(forward)
            elif kind.graph is not None:
                kind.graph.replay()
            elif kind.runs == 0 or self._paused or not kind.records:
                self._on_stream(forward)
            else:
                self._record(kind, forward)
        kind.runs += 1

    def _on_stream(self, forward: Callable[[], None]) -> None:
        """Run on the stream that records: what kernels keep for a stream then exists before a recording."""
        if self._stream is None:
            forward()
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                forward()
        finally:  # also where it breaks off: states that its kernels write to are read next
            current.wait_stream(self._stream)

    def _record(self, kind: StepKind, forward: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                forward()
        except torch.cuda.OutOfMemoryError:
            self.free()
            self._on_stream(forward)
            return
        except RuntimeError as error:  # a module that asks the host something, say
            kind.records = False
            self.note = f"decode steps were not recorded in CUDA graphs: {str(error).splitlines()[0]}"
            torch.cuda.synchronize(self.device)
            self._on_stream(forward)
            return
        self._pool = self._pool or graph.pool()
        kind.graph = graph
        graph.replay()

    def why_not(self, key: Key) -> str | None:
        """Why steps of this key are not run any more; None where they are."""
        count, text = self._failed.get(key, (0, ""))
        return None if count < MOST_FAILURES else f"it failed {count} times and is not tried again: {text}"

    def failed(self, key: Key, error: Exception) -> None:
        """Note a failure; so many of one key end it, unless one of its steps succeeds in between."""
        count = self._failed.pop(key, (0, ""))[0]
        self._failed[key] = count + 1, f"{type(error).__name__}: {error}"
        self._kinds.pop(key, None)
        while len(self._failed) > MOST_KEYS:
            self._failed.popitem(last=False)

    def succeeded(self, key: Key) -> None:
        if self._failed:
            self._failed.pop(key, None)
