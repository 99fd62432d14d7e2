"""Quest: pages by an upper bound of their best key (Tang et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.methods.base import Query
from saccade.methods.device_state import Opening
from saccade.methods.dial import Dial
from saccade.methods.options import require_choice, require_whole
from saccade.methods.pages import UNITS, Heads, page_choice, top_pages, units_of
from saccade.methods.tails import BlockMethod
from saccade.selection import Dense, Selection
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Choice

LEAST_PAGES = 3  # of the evaluation code, where the current page competes


@dataclass(frozen=True)
class Quest(BlockMethod):
    """Pages of ``block_size`` keys, ``budget`` keys in all, by ``sum_d max(q_d min_d, q_d max_d)`` over the page's
    channel-wise minima and maxima: no key of a page can score higher.

    ``current="always"`` reads the page of the row itself, within the budget, as the published kernels do;
    ``"competes"`` scores it like the others and reads at least 3 pages, as the published evaluation does. The first
    ``dense_layers`` layers are dense. Quest knows no groups; bounds are meaned over the query heads of a ``unit``.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "Quest, arXiv:2406.10774"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    dial: ClassVar[Dial | None] = Dial("budget", "keys")

    budget: int = 1024
    block_size: int = 16
    dense_layers: int = 2
    unit: str = "kv_head"
    current: str = "always"

    def __post_init__(self) -> None:
        require_whole("budget", self.budget, 1)
        require_choice("block_size", self.block_size, (8, 16, 32, 64, 128))
        require_whole("dense_layers", self.dense_layers, 0)
        require_choice("unit", self.unit, UNITS)
        require_choice("current", self.current, ("always", "competes"))
        self.check_tail()

    @property
    def joins_heads(self) -> bool:
        return self.unit == "layer"

    def select_decode(self, query: Query, state: Any) -> Selection:
        if query.layer < self.dense_layers:
            return Dense(query.shape)
        return self.with_tail(query, top_pages(query, self._choice(query.shape), self.joins_heads), self.block_size)

    def whole_upto(self, opening: Opening) -> int:
        return self._choice(opening.spec).dense_upto

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        if self.current == "competes" or self.stands_in:  # a device has no summary of a partial page, and no tails
            return None
        return DevicePlan.alike(self, spec, self._choice(spec), self.dense_layers)

    def _choice(self, shape: Heads) -> Choice:
        last, least = (0, LEAST_PAGES) if self.current == "competes" else (1, 1)
        return page_choice("minmax", self.block_size, units_of(self.unit, shape), self.budget, 0, last, least)
