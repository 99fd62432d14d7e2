"""What decode rows read on the C++ kernels, said once for all layers of a step (cpu_plans.py runs it)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor

from saccade.kv.block_codes import BlockCodes
from saccade.ops import cpu
from saccade.ops.cpu_structs import ALL_KEYS, band_keys, codes_of, native
from saccade.selection import Cone
from saccade.selection.readings import CHOICE, ENDS, Choice, Reading

SUMMARIES = {"cuboid": 2, "minmax": 2, "stored_mean": 1}  # that blocks are ranked by, and their parts


def serves(reading: Reading, kv_heads: int) -> str | None:
    """Why rows cannot read so here, on a model with so many KV heads; None where they can."""
    if reading.kernels not in _CALLS:
        return "its kernels are the method's own"
    choice = reading.choice
    if choice is None:
        return None
    if choice.source.summary not in SUMMARIES:
        return f"blocks are ranked by {', '.join(SUMMARIES)}, not by {choice.source.summary}"
    if choice.last < 1:
        return "the last block has no summary yet: it must be among those that are always read"
    if choice.rule is not None and choice.rule.rest == "estimate":
        return "its rule goes by guesses, which rows make one by one"
    return cpu.uneven(choice.units, kv_heads)


class Readings:
    """What the kernels take of a plan's layers, made once for all rows under it."""

    tallied = False  # whether kernels count what they read in the state of the row's method

    def __init__(self, layers: Sequence[Reading]) -> None:
        kinds = list(dict.fromkeys(layers))
        self._calls = [_CALLS[one.kernels](one) for one in kinds]
        self._all_upto = [one.all_upto for one in kinds]
        self._layers = [kinds.index(one) for one in layers]
        ruled = [one.choice for one in kinds if one.ruled]
        self.units = max((one.units for one in ruled if one is not None), default=0)  # of stopping rules

    def of_layers(self, layers: Sequence[int]) -> Readings:
        """Of some of the layers, as a plan of these alone."""
        own = copy(self)
        own._layers = [self._layers[layer] for layer in layers]
        return own

    def of(self, length: int) -> list[Any]:
        """By layer, what a row that sees ``length`` keys reads: a struct Keys or BlockChoice."""
        if len(self._calls) == 1:
            return [self._calls[0] if length > self._all_upto[0] else ALL_KEYS] * len(self._layers)
        calls = [call if length > upto else ALL_KEYS for call, upto in zip(self._calls, self._all_upto)]
        return [calls[i] for i in self._layers]

    def tell(
        self,
        step: Any,
        row: int,
        length: int,
        summaries: Sequence[Tensor],
        codes: Sequence[BlockCodes],
        noted: tuple[int, int],
        units: int,
    ) -> None:
        """Tell a DecodeStep what its ``row`` of so many keys reads. ``noted``: addresses where rules note for ``units``
        each, what they let in and cover."""
        known = [codes_of(one) for one in codes]
        step.reads(row, self.of(length), *_addresses(summaries), known, *noted, units)


class Seen(Readings):
    """All keys, as far as ``cones`` show them, one a layer."""

    def __init__(self, cones: Sequence[Cone | None]) -> None:
        self._cones, self.units = cones, 0
        self._grid = math.gcd(*(cone.block_size for cone in cones if cone is not None))
        self._ends: tuple[int, list[tuple[int, int]]] = -1, []  # of rows of one block: sinks and start of each layer

    def of_layers(self, layers: Sequence[int]) -> Readings:
        """See Readings."""
        return Seen([self._cones[layer] for layer in layers])

    def of(self, length: int) -> list[Any]:
        """See Readings."""
        block = (length - 1) // max(1, self._grid)
        if self._ends[0] != block:
            ends = [(0, 0) if cone is None else (cone.sink_keys, cone.start(length - 1)) for cone in self._cones]
            self._ends = block, ends
        return [band_keys(length - start, sinks) if start > sinks else ALL_KEYS for sinks, start in self._ends[1]]


class Listed(NamedTuple):
    """What the best of single keys are chosen by: ``keys`` a struct ListedKeys, ``layers`` a struct ListedLayer each,
    with which ``steps`` steps have run."""

    keys: Any
    layers: Sequence[Any]
    steps: int
    units: int = 0
    tallied: bool = True

    def tell(self, step: Any, row: int, length: int, summaries: Sequence[Tensor], *_: Any) -> None:
        """As of :class:`Readings`."""
        step.lists(row, self.keys, self.layers, *_addresses(summaries), self.steps)


class Shared(NamedTuple):
    """Keys shared with earlier rows: ``keys`` a struct SharedKeys, ``layers`` a struct SharedLayer each."""

    keys: Any
    layers: Sequence[Any]
    units: int = 0
    tallied: bool = True

    def tell(self, step: Any, row: int, *_: Any) -> None:
        """As of :class:`Readings`."""
        step.shares(row, self.keys, self.layers)


class Guessed(NamedTuple):
    """Blocks in the order of what labels of their keys guess, for a rule: ``choice`` a struct BlockChoice, ``layers`` a
    struct LabelKeys each, for so many ``units``."""

    choice: Any
    layers: Sequence[Any]
    units: int
    tallied: bool = False

    def tell(
        self, step: Any, row: int, length: int, summaries: Any, codes: Any, noted: tuple[int, int], units: int
    ) -> None:
        """As of :class:`Readings`."""
        step.guesses(row, self.choice, self.layers, *noted, units)


class Kept(NamedTuple):
    """Keys that are left of lists: ``keys`` a struct KeptKeys, ``layers`` a struct KeptLayer each."""

    keys: Any
    layers: Sequence[Any]
    units: int = 0
    tallied: bool = True

    def tell(self, step: Any, row: int, *_: Any) -> None:
        """As of :class:`Readings`."""
        step.keeps(row, self.keys, self.layers)


StateReads = Guessed | Listed | Shared | Kept  # of a method's state: ``layers`` may have a struct Keys in any place
Reads = Readings | StateReads


def _addresses(summaries: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """By layer, and how many blocks each has."""
    return [one.data_ptr() for one in summaries], [one.shape[0] for one in summaries]


def _ends(reading: Reading) -> Any:
    assert reading.ends is not None
    sinks, window = reading.ends
    return ALL_KEYS if window is None else band_keys(window, sinks)


def _choice(reading: Reading) -> Any:
    assert reading.choice is not None
    return block_choice(reading.choice)


def block_choice(choice: Choice) -> Any:
    """A struct BlockChoice."""
    common = {
        "size": choice.size,
        "units": choice.units,
        "parts": 0 if choice.labelled else SUMMARIES[choice.source.summary],
        "first": choice.first,
        "last": choice.last,
    }
    rule = choice.rule
    if rule is None:
        return native.BlockChoice(**common, take=choice.take)
    return native.BlockChoice(
        **common,
        microbatch=rule.microbatch,
        epsilon=rule.epsilon,
        least=rule.rest == "min",
        mean=rule.stop == "mean",
        guessed=rule.rest == "estimate",
        margin=rule.margin,
    )


_CALLS: dict[str, Callable[[Reading], Any]] = {ENDS: _ends, CHOICE: _choice}
