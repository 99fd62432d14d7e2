"""What decode rows read on the C++ kernels, said once for all layers of a step (cpu_plans.py runs it)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from saccade.ops import cpu
from saccade.ops.cpu_structs import ALL_KEYS, band_keys, native
from saccade.selection import Cone
from saccade.selection.plan import BestBlocks, Ends, Everything, OwnReading, RankedBlocks, Reading

SUMMARIES = {"cuboid": 2, "minmax": 2, "stored_mean": 1}  # that blocks are ranked by, and their parts


def serves(reading: Reading, kv_heads: int) -> str | None:
    """Why rows cannot read so here, on a model with so many KV heads; None where they can."""
    if isinstance(reading, Everything | Ends):
        return None
    if isinstance(reading, OwnReading):
        return "its kernels are the method's own"
    if reading.summary not in SUMMARIES:
        return f"blocks are ranked by {', '.join(SUMMARIES)}, not by {reading.summary}"
    if reading.last < 1:
        return "the last block has no summary yet: it must be among those that are always read"
    if isinstance(reading, RankedBlocks) and reading.rest == "estimate":
        return "its rule goes by guesses, which rows make one by one"
    return cpu.uneven(reading.units, kv_heads)


class Readings:
    """What the kernels take of a plan's layers, made once for all rows under it."""

    def __init__(self, layers: Sequence[Reading]) -> None:
        kinds = list(dict.fromkeys(layers))
        self._calls = [_choice(one) if isinstance(one, BestBlocks | RankedBlocks) else _keys(one) for one in kinds]
        self._dense_upto = [_dense_upto(one) for one in kinds]
        self._layers = [kinds.index(one) for one in layers]
        self.units = max((one.units for one in kinds if isinstance(one, RankedBlocks)), default=0)  # of stopping rules

    def of(self, length: int) -> list[Any]:
        """By layer, what a row that sees ``length`` keys reads: a struct Keys or BlockChoice."""
        if len(self._calls) == 1:
            return [self._calls[0] if length > self._dense_upto[0] else ALL_KEYS] * len(self._layers)
        calls = [call if length > upto else ALL_KEYS for call, upto in zip(self._calls, self._dense_upto)]
        return [calls[i] for i in self._layers]


class Seen(Readings):
    """All keys, as far as ``cones`` show them, one a layer."""

    def __init__(self, cones: Sequence[Cone | None]) -> None:
        self._cones, self.units = cones, 0
        self._grid = math.gcd(*(cone.block_size for cone in cones if cone is not None))
        self._ends: tuple[int, list[tuple[int, int]]] = -1, []  # of rows of one block: sinks and start of each layer

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


class Shared(NamedTuple):
    """Keys shared with earlier rows: ``keys`` a struct SharedKeys, ``layers`` a struct SharedLayer each."""

    keys: Any
    layers: Sequence[Any]


class Kept(NamedTuple):
    """Keys that are left of lists: ``keys`` a struct KeptKeys, ``layers`` a struct KeptLayer each."""

    keys: Any
    layers: Sequence[Any]


def _dense_upto(reading: Reading) -> int:
    """Rows of so many keys read everything."""
    if isinstance(reading, BestBlocks | RankedBlocks):
        return reading.dense_upto
    return reading.longest if isinstance(reading, Ends) else 0


def _keys(reading: Reading) -> Any:
    return band_keys(reading.window, reading.sinks) if isinstance(reading, Ends) else ALL_KEYS


def _choice(reading: BestBlocks | RankedBlocks) -> Any:
    common = {
        "size": reading.size,
        "units": reading.units,
        "parts": SUMMARIES[reading.summary],
        "first": reading.first,
        "last": reading.last,
    }
    if isinstance(reading, BestBlocks):
        return native.BlockChoice(**common, take=reading.take)
    return native.BlockChoice(
        **common,
        microbatch=reading.microbatch,
        epsilon=reading.epsilon,
        least=reading.rest == "min",
        mean=reading.stop == "mean",
    )
