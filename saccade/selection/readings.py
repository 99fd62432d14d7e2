"""Readings: what one layer reads for a decode row, as plain data that carries its own behaviour.

A reading has two sides:

* its *form*: kinds, sizes, lists per layer. Kernels are compiled and launched for it, and it is part of the key of a
  recorded graph. Where a kernel needs to know how long a list can get, the form says so in powers of two.
* its *numbers*: budgets, lengths, epsilon. Kernels take them from a buffer, a row at a time.

A new kind is a frozen dataclass over :class:`Reading`, in the file of its method. It names the ``kernels`` that serve
it: ``ENDS`` and ``CHOICE`` read what its ``ends`` or its ``choice`` says, on a CPU (ops/cpu_readings.py) and on a GPU
(ops/triton/batched_reading.py). An :class:`OwnReading` brings kernels of its own. Nothing else asks what kind it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection.base import Band, Dense, Selection, Shape, Tokens
from saccade.selection.blocks import Blocks
from saccade.selection.forms import LABELS, MOST, Known, Numbers, PlanSpec, Rule, Summarized, bucket

ENDS, CHOICE, OWN = "ends", "choice", "own"  # names of kernels
M = TypeVar("M")


@dataclass(frozen=True)
class Reading:
    """Base of readings. Its fields are its form, unless it says otherwise."""

    kernels: ClassVar[str] = OWN
    windows: ClassVar[bool] = False  # whether it keeps to the rows' windows
    listed: ClassVar[bool] = True  # whether it is known before anything is read which keys are, or which first

    @property
    def ends(self) -> tuple[int, int | None] | None:
        """The number of first and of last keys that it reads (None: all), where that is what it reads."""
        return None

    @property
    def choice(self) -> Choice | None:
        """The choice of blocks that it reads, where that is what it reads."""
        return None

    @property
    def blocks(self) -> Summarized | None:
        """The blocks that its kernels know by more than their keys, if any."""
        return None

    @property
    def each(self) -> int:
        """Most rows of one request in a step."""
        return 1

    @property
    def ruled(self) -> bool:
        """Whether a stopping rule decides how much is read, and counts it."""
        return False

    @property
    def form(self) -> Reading:
        return self

    @property
    def numbers(self) -> Numbers:
        return Numbers()

    @property
    def on_host(self) -> Reading:
        """The same as a CPU's kernels read it, where these count other things."""
        return self

    @property
    def all_upto(self) -> int:
        """Rows of up to so many keys read everything."""
        return 0

    def cost(self, length: int, step: int = 0) -> Known:
        """Of a row that sees ``length`` keys, the turn's decode step ``step`` from 0."""
        raise NotImplementedError

    def most_blocks(self, page: int, blocks: int) -> int:
        """KV blocks of ``page`` tokens, of a sequence's ``blocks``, that a layer may read."""
        return blocks

    def why_not(self, spec: PlanSpec) -> str | None:
        """What its kernels do not serve of such a model; None where they do."""
        return None

    def read(self, rows: Any) -> Any:
        """Attend for ``rows`` (ops.triton.batched_rows.LayerRows), whose keys are stored, by kernels of its own;
        returns a LayerRead."""
        raise NotImplementedError

    def selection(self, shape: Shape, lists: Sequence[Tensor]) -> Selection:
        """What one row read, of which kernels made ``lists``, one a unit."""
        return Tokens.from_lists(shape, list(lists))


@dataclass(frozen=True)
class OwnReading(Reading, Generic[M]):
    """Base of readings whose kernels their method brings. Its numbers are the words of the rows' device states
    (methods/device_state.py). What it reads is counted on the device. ``method``, whose options decide what a row
    costs, is no part of its form; None where nothing depends on them."""

    listed = False

    method: M = field(default=None, kw_only=True)  # type: ignore[assignment]

    @property
    def form(self) -> Reading:
        return replace(self, method=None)  # type: ignore[arg-type]

    def cost(self, length: int, step: int = 0) -> Known:
        return Known("tokens", 0, 0)


@dataclass(frozen=True)
class Everything(Reading):
    """All keys. ``rows``: the request has so many rows at most, which are its last ones, and each reads the keys up to
    its own. ``kept``: block summaries that stay up to date, for others who read them."""

    kernels = ENDS

    rows: int = 1
    kept: Summarized | None = None

    @property
    def ends(self) -> tuple[int, int | None]:
        return 0, None

    @property
    def each(self) -> int:
        return self.rows

    @property
    def blocks(self) -> Summarized | None:
        return self.kept

    def cost(self, length: int, step: int = 0) -> Known:
        return Known("dense", length, 0)

    def selection(self, shape: Shape, lists: Sequence[Tensor]) -> Selection:
        return Dense(shape)


@dataclass(frozen=True)
class Ends(Reading):
    """The first ``sinks`` and the last ``window`` keys. Numbers: sinks, window."""

    kernels = ENDS

    sinks: int
    window: int

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1:
            raise SaccadeError(f"ends need sinks >= 0 and window >= 1, got sinks={self.sinks}, window={self.window}")

    @property
    def ends(self) -> tuple[int, int | None]:
        return self.sinks, self.window

    @property
    def longest(self) -> int:
        """Most keys of a list."""
        return self.sinks + self.window

    @property
    def all_upto(self) -> int:
        return self.longest

    @property
    def form(self) -> Ends:
        """Its bound alone counts."""
        return Ends(0, bucket(self.longest))

    @property
    def numbers(self) -> Numbers:
        return Numbers(min(self.sinks, MOST // 2), min(self.window, MOST // 2))

    def cost(self, length: int, step: int = 0) -> Known:
        return Known("dense", length, 0) if length <= self.longest else Known("band", self.longest, 0)

    def selection(self, shape: Shape, lists: Sequence[Tensor]) -> Selection:
        dense = shape.k_len <= self.longest
        return Dense(shape) if dense else Band(shape, window=self.window, sinks=self.sinks)


@dataclass(frozen=True)
class Choice(Reading):
    """Blocks of keys, a list for each of ``units``, scored by their ``source``, ties to the lower block. Rows of up to
    ``dense_upto`` keys read everything; longer ones the ``first`` first and ``last`` last blocks, and of the others

    * the ``take`` best, by scores meaned over a unit's query heads. The partial block is one of the last ones.
    * or by falling score as many as the ``rule`` lets in. The partial block comes on top of the last ones.

    Numbers: take, dense_upto, epsilon. SaccadeError unless there is one of take and rule; where ``dense_upto`` lets in
    rows with too few blocks, or none to rank; and where the last full block, whose last key the same step labels, is to
    be ranked by labels.
    """

    kernels = CHOICE

    source: Summarized
    units: int
    first: int
    last: int
    dense_upto: int
    take: int | None = None
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if (self.take is None) == (self.rule is None):
            raise SaccadeError(f"blocks are chosen by take or by a rule, got take={self.take}, rule={self.rule}")
        if self.labelled and self.last < 1:
            raise SaccadeError(f"blocks that labels rank are not the last one: last must be at least 1, is {self.last}")
        take, spare = (1, 1) if self.take is None else (self.take, 0)
        least = (self.first + self.last + take) * self.size - spare
        if min(self.first, self.last, take) < 0 or self.dense_upto < least:
            raise SaccadeError(
                f"rows of more than dense_upto={self.dense_upto} keys in blocks of {self.size} may have fewer than "
                f"first={self.first}, last={self.last} and {take} others: it must be at least {least}"
            )

    @property
    def choice(self) -> Choice:
        return self

    @property
    def blocks(self) -> Summarized:
        return self.source

    @property
    def size(self) -> int:
        return self.source.size

    @property
    def labelled(self) -> bool:
        return self.source.summary == LABELS

    @property
    def ruled(self) -> bool:
        return self.rule is not None

    @property
    def stops(self) -> Rule:
        """The rule, where there is one."""
        assert self.rule is not None
        return self.rule

    @property
    def all_upto(self) -> int:
        return self.dense_upto

    @property
    def longest(self) -> int:
        """Most blocks of a list; under a rule of those that are read without a rank."""
        return max(self.first + self.last + (1 if self.take is None else self.take), -(-self.dense_upto // self.size))

    @property
    def form(self) -> Choice:
        """The same choice with as many blocks as its bucket holds."""
        room = bucket(self.longest)
        if self.rule is not None:
            return replace(self, rule=replace(self.rule, epsilon=1.0), dense_upto=room * self.size)
        return replace(self, take=room - self.first - self.last if self.take else 0, dense_upto=room * self.size)

    @property
    def numbers(self) -> Numbers:
        epsilon = 0.0 if self.rule is None else self.rule.epsilon
        return Numbers(min(self.take or 0, MOST), min(self.dense_upto, MOST), epsilon)

    def cost(self, length: int, step: int = 0) -> Known:
        """The blocks that a rule lets in come on top; the device counts them."""
        if length <= self.dense_upto:
            return Known("dense", length, 0)
        full, partial = divmod(length, self.size)
        forced = self.first + self.last
        if self.take is None:
            return Known("blocks", forced * self.size + partial, length if self.labelled else full - forced)
        blocks = full + (partial > 0)
        keys = (forced + self.take) * self.size - (self.size * blocks - length)
        return Known("blocks", keys, blocks - forced if self.take else 0)

    def most_blocks(self, page: int, blocks: int) -> int:
        if self.take is None:
            return blocks  # a rule may go on to the end
        size = self.size
        each = max(1, size // page) if max(size, page) % min(size, page) == 0 else size // page + 2
        return self.units * (self.first + self.last + self.take) * each

    def selection(self, shape: Shape, lists: Sequence[Tensor]) -> Selection:
        dense = shape.k_len <= self.dense_upto
        return Dense(shape) if dense else Blocks.from_lists(shape, self.size, lists)
