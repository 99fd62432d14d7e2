"""StreamingLLM's fixed pattern (Xiao et al., 2024): attention sinks and a local window, positions kept as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.methods.base import Chunk, Method, Query
from saccade.methods.device_state import Opening
from saccade.methods.dial import Dial
from saccade.methods.options import require_whole
from saccade.selection import Band, Dense, Selection
from saccade.selection.forms import PlanSpec
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Ends


@dataclass(frozen=True)
class Streaming(Method):
    """The first ``sinks`` keys and the last ``window`` keys, the current one included (row p reads i iff i < sinks or
    p - i < window). It forgets nothing in storage but never looks in between."""

    name: ClassVar[str] = "streaming"
    paper: ClassVar[str] = "StreamingLLM, arXiv:2309.17453"
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    begins_at_once: ClassVar[bool] = True
    dial: ClassVar[Dial | None] = Dial("window", "keys")

    sinks: int = 4
    window: int = 1024

    def __post_init__(self) -> None:
        require_whole("sinks", self.sinks, 0)
        require_whole("window", self.window, 1)

    def select_prefill(self, chunk: Chunk) -> Selection:
        if chunk.shape.k_len <= self.sinks + self.window:
            return Dense(chunk.shape)
        return Band(chunk.shape, window=self.window, sinks=self.sinks)

    def select_decode(self, query: Query, state: Any) -> Selection:
        return self.select_prefill(query)

    def whole_upto(self, opening: Opening) -> int:
        return self.sinks + self.window

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        return DevicePlan.alike(self, spec, Ends(self.sinks, self.window))
