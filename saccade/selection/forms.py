"""What readings (selection/readings.py) are made of: plain data that methods, kernels and the engine share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MOST = 2**31 - 1  # numbers are int32
LABELS = "labels"  # what blocks are ranked by where every key has a label, which a row's device state holds


class PlanSpec(Protocol):
    """What a plan may hang on. ``windows[i]``: layer i's sliding window in tokens that rules there, or None.
    ``value_dim``: see KVFormat."""

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
    @property
    def value_dim(self) -> int | None: ...


@dataclass(frozen=True)
class LayersSpec:
    """Some layers of a model, none of which has a window that rules: what states of these alone are made for."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None

    @classmethod
    def of(cls, spec: PlanSpec, layers: int) -> LayersSpec:
        return cls(layers, spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None,) * self.layers


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
    """Blocks of ``size`` keys with their ``summary`` (see kv.summaries); ``LABELS``: with labels of all channels of
    their keys in ``bits`` bits each (methods.labels.Labels), which the row's device state holds."""

    size: int
    summary: str
    bits: int = 0


@dataclass(frozen=True)
class Rule:
    """When to stop reading ranked blocks: see :class:`saccade.selection.Ranking`, whose fields these are."""

    epsilon: float
    microbatch: int
    rest: str
    stop: str
    margin: float = 0.0


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

    def at_least(self, keys: int) -> Room:
        """The same, for lists of up to ``keys`` keys too."""
        return Room(max(self.keys, bucket(keys)), self.of_all)

    def upto(self, longest: int) -> int:
        """Keys of a list in a step whose rows have at most ``longest``."""
        return min(longest, self.keys + math.ceil(self.of_all * longest))
