"""How a decode method reads keys in a batched step: what a row of a given length reads is known before the step, except
the choice among blocks, which is the device's."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.methods.arkvale import ArkVale
from saccade.methods.base import Method
from saccade.methods.dense import DenseMethod
from saccade.methods.psa import PSA, SINK_BLOCKS
from saccade.methods.quest import Quest
from saccade.methods.streaming import Streaming
from saccade.models.interface import ModelSpec
from saccade.ops.triton.batched_decode import PageChoice
from saccade.ops.triton.progressive import MOST_KEYS, Rule

SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Everything:
    """All keys."""

    def counts(self, length: int) -> tuple[str, int, int]:
        """What a row of ``length`` keys costs: kind of selection, keys read for certain, blocks scored."""
        return "dense", length, 0


@dataclass(frozen=True)
class Ends:
    """The first ``sinks`` and the last ``window`` keys."""

    sinks: int
    window: int

    def counts(self, length: int) -> tuple[str, int, int]:
        some = self.sinks + self.window
        return ("dense", length, 0) if length <= some else ("band", some, 0)


@dataclass(frozen=True)
class BestBlocks:
    """A fixed number of blocks by their summaries; with a ``rule``, ranked blocks until it says stop."""

    choice: PageChoice
    rule: Rule | None = None

    def counts(self, length: int) -> tuple[str, int, int]:
        """The blocks that a rule lets a row read come on top; the device counts them."""
        choice, size = self.choice, self.choice.size
        if length <= choice.dense_upto:
            return "dense", length, 0
        blocks = -(-length // size)
        forced = choice.first + choice.last + (choice.after_full and length % size > 0)
        keys = (forced + max(0, choice.take)) * size - (size * blocks - length)
        scored = blocks - forced if self.rule is not None or choice.take > 0 else 0
        return "blocks", keys, scored


Reading = Everything | Ends | BestBlocks


@dataclass(frozen=True, eq=False)
class Plan:
    """What each layer reads under one method, whose text is ``name``."""

    name: str
    method: str
    layers: tuple[Reading, ...]

    @property
    def blocks(self) -> BestBlocks | None:
        """The one block choice there is, if any."""
        return next((one for one in self.layers if isinstance(one, BestBlocks)), None)

    @property
    def ruled(self) -> bool:
        """Whether the device decides how much is read, and counts it."""
        return self.blocks is not None and self.blocks.rule is not None


def plan_of(method: Method, spec: ModelSpec) -> Plan | None:
    """The plan of ``method`` on a model, or None where its steps cannot be batched."""
    everything = Everything()
    readings: list[Reading]
    if isinstance(method, DenseMethod):
        readings = [everything if window is None else Ends(0, window) for window in spec.windows]
    elif any(window is not None for window in spec.windows):
        return None  # whether such a layer's window or the method rules hangs on each row's length
    elif isinstance(method, Streaming):
        readings = [Ends(method.sinks, method.window)] * spec.layers
    else:
        blocks = _blocks(method, spec)
        if blocks is None:
            return None
        dense = method.dense_layers if isinstance(method, Quest) else 0
        readings = [everything if layer < dense else blocks for layer in range(spec.layers)]
    return Plan(method.text, method.name, tuple(readings))


def _blocks(method: Method, spec: ModelSpec) -> BestBlocks | None:
    units = {"kv_head": spec.kv_heads, "layer": 1}
    if isinstance(method, PSA):
        keys = method.microbatch * method.block_size
        if method.unit != "kv_head" or method.block_size not in SIZES or keys > MOST_KEYS:
            return None
        if method.rank != "cuboid":  # nor with it rest="estimate": the device ranks by cuboids alone
            return None
        most = (SINK_BLOCKS + 2 + method.microbatch) * method.block_size - 1
        choice = PageChoice(method.block_size, "cuboid", spec.kv_heads, SINK_BLOCKS, 1, 0, most, after_full=True)
        return BestBlocks(choice, Rule(method.epsilon, method.microbatch, method.rest, method.stop))
    if isinstance(method, ArkVale):
        kind, first, last = "cuboid", method.sinks, method.window
    elif isinstance(method, Quest) and method.current == "always":
        kind, first, last = "minmax", 0, 1
    else:
        return None
    size = method.block_size
    if method.unit not in units or size not in SIZES:
        return None
    count = max(1, method.budget // size)
    upto = max(method.budget, count * size, (first + last) * size)
    return BestBlocks(PageChoice(size, kind, units[method.unit], first, last, count - first - last, upto))
