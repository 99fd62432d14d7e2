"""ArkVale: pages by the cuboid-mean of their keys (Chen et al., NeurIPS 2024).

PSA's baseline "vllm-sparse": the same page scores as PSA with a fixed number of pages instead of a stopping rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.methods.base import Query
from saccade.methods.device_state import Opening
from saccade.methods.dial import Dial
from saccade.methods.options import require_choice, require_whole
from saccade.methods.pages import UNITS, Heads, page_choice, top_pages, units_of
from saccade.methods.tails import BlockMethod
from saccade.selection import Selection
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Choice


@dataclass(frozen=True)
class ArkVale(BlockMethod):
    """``budget`` keys in pages of ``block_size``: the first ``sinks`` and last ``window`` pages, the partial one
    included, and the best others. One set per layer as published (``unit="layer"``), by scores meaned over its query
    heads.

    ``budget`` is what a step reads; the published code's is the device cache, twice that. Its recall of pages from the
    host changes nothing in what is read, so it is no part of the method.
    """

    name: ClassVar[str] = "arkvale"
    paper: ClassVar[str] = "ArkVale, NeurIPS 2024"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    dial: ClassVar[Dial | None] = Dial("budget", "keys")

    budget: int = 2048
    block_size: int = 32
    sinks: int = 2
    window: int = 2
    unit: str = "layer"

    def __post_init__(self) -> None:
        require_whole("budget", self.budget, 1)
        require_choice("block_size", self.block_size, (8, 16, 32, 64, 128))
        require_whole("sinks", self.sinks, 0)
        require_whole("window", self.window, 1)
        require_choice("unit", self.unit, UNITS)
        self.check_tail()

    @property
    def joins_heads(self) -> bool:
        return self.unit == "layer"

    def select_decode(self, query: Query, state: Any) -> Selection:
        return self.with_tail(query, top_pages(query, self._choice(query.shape), self.joins_heads), self.block_size)

    def whole_upto(self, opening: Opening) -> int:
        return self._choice(opening.spec).dense_upto

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        return None if self.stands_in else DevicePlan.alike(self, spec, self._choice(spec))

    def _choice(self, shape: Heads) -> Choice:
        units = units_of(self.unit, shape)
        return page_choice("cuboid", self.block_size, units, self.budget, self.sinks, self.window)
