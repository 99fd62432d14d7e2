"""How a device serves a decode method: what every layer reads, as plain data.

A :class:`DevicePlan` has one reading for each layer. A reading has two sides:

* its *form*: kinds, sizes, lists per layer. Kernels are compiled and launched for it, and it is part of the key of a
  recorded graph. Where a kernel needs to know how long a list can get, the form says so in powers of two.
* its *numbers*: budgets, lengths, epsilon. Kernels take them from a buffer, a row at a time.

Requests whose plans have one form share launches and graphs, whatever their numbers are.

A new kind of reading is a frozen dataclass with ``form``, ``numbers`` and ``cost``, and a branch in
``engine/device_attention.py`` that launches its kernels. A method whose steps need more than that brings a reading of
its own, an :class:`OwnReading`, with its kernels in the method's package. What a row remembers between steps lies in
the state of its sequence (methods/device_state.py). The step's buffers hold only its numbers and pointers to it, as
they do for block summaries, so that a graph survives a change of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

from saccade.errors import SaccadeError

MOST = 2**31 - 1  # numbers are int32
LABELS = "labels"  # what blocks are ranked by where every key has a label, which a row's device state holds


class PlanSpec(Protocol):
    """What a plan may hang on. ``windows[i]``: layer i's sliding window in tokens, or None."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...


class Named(Protocol):
    """A method, as far as a plan knows one."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...


class Numbers(NamedTuple):
    """What kernels take from buffers: two integers, int32, and a float32. Each kind says what they are."""

    first: int = 0
    second: int = 0
    share: float = 0.0


class Known(NamedTuple):
    """What a row's reading costs, as far as its length tells: the kind of selection, the keys that it reads for
    certain, the blocks whose summaries are scored."""

    kind: str
    keys: int
    scored: int
    exact: int = 0  # keys whose logits are computed to choose
    searchable: bool = False  # whether the row may reuse what an earlier one found; the device counts who searched
    chooses: bool = False  # whether it scores something, though only the device knows how much


@dataclass(frozen=True)
class Summarized:
    """Blocks of ``size`` keys with their ``summary`` (see kv.summaries)."""

    size: int
    summary: str


@dataclass(frozen=True)
class OwnReading:
    """Base of readings whose kernels their method brings. Its fields are its form; its numbers are the words of the
    rows' device states (methods/device_state.py). What it reads is counted on the device."""

    windows: ClassVar[bool] = False  # whether it keeps to the rows' windows

    @property
    def blocks(self) -> Summarized | None:
        """The block summaries that its kernels read, if any."""
        return None

    @property
    def form(self) -> OwnReading:
        return self

    @property
    def numbers(self) -> Numbers:
        return Numbers()

    def cost(self, length: int, step: int = 0) -> Known:
        """Of a row that sees ``length`` keys, the turn's decode step ``step`` from 0."""
        return Known("tokens", 0, 0)

    def why_not(self, spec: PlanSpec) -> str | None:
        """What its kernels do not serve of such a model; None where they do."""
        return None

    def read(self, rows: Any) -> Any:
        """Attend for ``rows`` (ops.triton.batched_rows.LayerRows), whose keys are stored; returns a LayerRead."""
        raise NotImplementedError


@dataclass(frozen=True)
class Everything:
    """All keys. ``rows``: the request has so many rows at most, which are its last ones, and each reads the keys up to
    its own. ``kept``: block summaries that stay up to date, for others who read them."""

    rows: int = 1
    kept: Summarized | None = None

    @property
    def blocks(self) -> Summarized | None:
        return self.kept

    @property
    def form(self) -> Everything:
        return self

    @property
    def numbers(self) -> Numbers:
        return Numbers()

    def cost(self, length: int) -> Known:
        return Known("dense", length, 0)


@dataclass(frozen=True)
class Ends:
    """The first ``sinks`` and the last ``window`` keys. Numbers: sinks, window."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1:
            raise SaccadeError(f"ends need sinks >= 0 and window >= 1, got sinks={self.sinks}, window={self.window}")

    @property
    def longest(self) -> int:
        """Most keys of a list."""
        return self.sinks + self.window

    @property
    def form(self) -> Ends:
        """Its bound alone counts."""
        return Ends(0, bucket(self.longest))

    @property
    def numbers(self) -> Numbers:
        return Numbers(min(self.sinks, MOST // 2), min(self.window, MOST // 2))

    def cost(self, length: int) -> Known:
        return Known("dense", length, 0) if length <= self.longest else Known("band", self.longest, 0)


@dataclass(frozen=True)
class BestBlocks:
    """Blocks of ``size`` keys, a list for each of ``units``: the ``first`` first and the ``last`` last ones, the
    partial one among them, and the ``take`` best of the others by their ``summary`` (see kv.summaries), scores meaned
    over a unit's query heads, ties to the lower block. Rows of up to ``dense_upto`` keys read everything.

    Numbers: take, dense_upto. SaccadeError where ``dense_upto`` lets in rows with too few blocks.
    """

    size: int
    summary: str
    units: int
    first: int
    last: int
    take: int
    dense_upto: int

    after_full = False  # the partial block is one of the last ones

    def __post_init__(self) -> None:
        listed = self.first + self.last + self.take
        if min(self.first, self.last, self.take) < 0 or self.dense_upto < listed * self.size:
            raise SaccadeError(
                f"{listed} blocks of {self.size} keys (first={self.first}, last={self.last}, take={self.take}) cannot "
                f"be listed for every row of more than dense_upto={self.dense_upto} keys: it must be at least "
                f"{listed * self.size}"
            )

    @property
    def longest(self) -> int:
        """Most blocks of a list."""
        return max(self.first + self.last + self.take, -(-self.dense_upto // self.size))

    @property
    def form(self) -> BestBlocks:
        """The same choice with as many blocks as its bucket holds."""
        room = bucket(self.longest)
        return replace(self, take=room - self.first - self.last if self.take else 0, dense_upto=room * self.size)

    @property
    def numbers(self) -> Numbers:
        return Numbers(min(self.take, MOST), min(self.dense_upto, MOST))

    def cost(self, length: int) -> Known:
        if length <= self.dense_upto:
            return Known("dense", length, 0)
        blocks, forced = -(-length // self.size), self.first + self.last
        keys = (forced + self.take) * self.size - (self.size * blocks - length)
        return Known("blocks", keys, blocks - forced if self.take else 0)


@dataclass(frozen=True)
class RankedBlocks:
    """Blocks of ``size`` keys for each of ``units``: the ``first`` first, the ``last`` last full ones and the partial
    one, and of the others, by falling score of their ``summary``, as many as the stopping rule of
    :class:`saccade.selection.Ranking` lets in (``epsilon``, ``microbatch``, ``rest``, ``stop``, ``margin``). Rows of
    up to ``dense_upto`` keys read everything. With the summary ``LABELS`` blocks are ranked by labels of all channels
    of their keys, ``bits`` bits each (methods.labels.Labels), which the row's device state holds.

    Numbers: none, dense_upto, epsilon. SaccadeError where ``dense_upto`` lets in rows with nothing to rank, and where
    the last full block, whose last key the same step labels, is to be ranked by labels.
    """

    size: int
    summary: str
    units: int
    first: int
    last: int
    microbatch: int
    rest: str
    stop: str
    epsilon: float
    dense_upto: int
    margin: float = 0.0
    bits: int = 0

    after_full = True  # the partial block comes on top of the last ones

    def __post_init__(self) -> None:
        if self.labelled and self.last < 1:
            raise SaccadeError(f"blocks that labels rank are not the last one: last must be at least 1, is {self.last}")
        least = (self.first + self.last + 1) * self.size - 1
        if min(self.first, self.last) < 0 or self.dense_upto < least:
            raise SaccadeError(
                f"rows of more than dense_upto={self.dense_upto} keys in blocks of {self.size} may have none to rank "
                f"beside first={self.first} and last={self.last}: it must be at least {least}"
            )

    @property
    def labelled(self) -> bool:
        return self.summary == LABELS

    @property
    def longest(self) -> int:
        """Most blocks that are read without a rank."""
        return max(self.first + self.last + 1, -(-self.dense_upto // self.size))

    @property
    def form(self) -> RankedBlocks:
        return replace(self, epsilon=1.0, dense_upto=bucket(self.longest) * self.size)

    @property
    def numbers(self) -> Numbers:
        return Numbers(0, min(self.dense_upto, MOST), self.epsilon)

    def cost(self, length: int) -> Known:
        """The blocks that the rule lets in come on top; the device counts them."""
        if length <= self.dense_upto:
            return Known("dense", length, 0)
        full, partial = divmod(length, self.size)
        scored = length if self.labelled else full - self.first - self.last
        return Known("blocks", (self.first + self.last) * self.size + partial, scored)


Reading = Everything | Ends | BestBlocks | RankedBlocks | OwnReading


@dataclass(frozen=True)
class DevicePlan:
    """What each layer reads under one method: ``name`` is its text, options included, and ``method`` its name alone.
    Layers that read blocks do so by one summary and block size, which their rows keep; SaccadeError if they do not."""

    name: str
    method: str
    layers: tuple[Reading, ...]

    def __post_init__(self) -> None:
        kinds = [blocks_of([one]) for one in self.layers]
        summaries = {(one.summary, one.size) for one in kinds if one is not None}
        if len(summaries) > 1:
            raise SaccadeError(f"the layers of a device plan share one kind of block summary, got {sorted(summaries)}")

    @classmethod
    def of(cls, method: Named, layers: Iterable[Reading]) -> DevicePlan:
        return cls(method.text, method.name, tuple(layers))

    @classmethod
    def alike(cls, method: Named, spec: PlanSpec, reading: Reading, dense_layers: int = 0) -> DevicePlan | None:
        """``reading`` in every layer but the first ``dense_layers``, which read everything. None on models with sliding
        windows: whether such a layer's window or the method decides hangs on each row's length."""
        if any(window is not None for window in spec.windows):
            return None
        dense = min(dense_layers, spec.layers)
        return cls.of(method, [Everything()] * dense + [reading] * (spec.layers - dense))

    @cached_property
    def form(self) -> tuple[Reading, ...]:
        """What a group of rows and its graph share: the layers without their numbers."""
        forms = {one: one.form for one in set(self.layers)}
        return tuple(forms[one] for one in self.layers)

    @cached_property
    def numbers(self) -> list[Numbers]:
        """Each layer's."""
        return [one.numbers for one in self.layers]

    @cached_property
    def blocks(self) -> BestBlocks | RankedBlocks | Summarized | None:
        """The kind of block choice that there is, or what a method's own readings know of blocks, if any."""
        return blocks_of(self.layers)

    @cached_property
    def summarized(self) -> Summarized | None:
        """The block summaries that rows keep, if any."""
        blocks = self.blocks
        if blocks is None or (isinstance(blocks, RankedBlocks) and blocks.labelled):
            return None
        return Summarized(blocks.size, blocks.summary)

    @cached_property
    def keeps(self) -> bool:
        """Whether rows have a device state, to whose numbers and memory their buffers point."""
        return not self.listed or any(isinstance(one, RankedBlocks) and one.labelled for one in self.layers)

    @cached_property
    def listed(self) -> bool:
        """Whether it is known before anything is read which keys a layer reads, or which first."""
        return not any(isinstance(one, OwnReading) for one in self.layers)

    @property
    def ruled(self) -> bool:
        """Whether the device decides how much is read, and counts it."""
        return isinstance(self.blocks, RankedBlocks)


def blocks_of(layers: Iterable[Reading]) -> BestBlocks | RankedBlocks | Summarized | None:
    """The first layer's that chooses blocks, or knows something of them."""
    for one in layers:
        if isinstance(one, BestBlocks | RankedBlocks):
            return one
        if isinstance(one, OwnReading | Everything) and one.blocks is not None:
            return one.blocks
    return None


def bucket(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


@dataclass(frozen=True)
class Room:
    """How long a list may get, as part of a form: ``keys``, and the share ``of_all`` of the keys of the step's longest
    row, each the next power of two of what is asked for."""

    keys: int
    of_all: float = 0.0

    @classmethod
    def of(cls, budget: float, more: int) -> Room:
        """For ``budget`` keys, or below 1 that share of them, and ``more`` beside."""
        if budget >= 1:
            return cls(bucket(int(budget) + more))
        return cls(bucket(more + 2), 2.0 ** math.ceil(math.log2(budget)))

    def upto(self, longest: int) -> int:
        """Keys of a list in a step whose rows have at most ``longest``."""
        return min(longest, self.keys + math.ceil(self.of_all * longest))
