"""Double Sparsity: tokens by a few channels of their keys (Yang et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.methods.base import Chunk, Query
from saccade.methods.device_state import DeviceState, Opening
from saccade.methods.labels import WHOLE_BITS, Labels
from saccade.methods.labels.recorded import BestKeys, RecordedLabels
from saccade.methods.measured import Measured
from saccade.methods.options import budget_keys, require_budget, require_choice, require_number, require_whole
from saccade.methods.whole import WholeMethod
from saccade.selection import Dense, Selection
from saccade.selection.forms import PlanSpec, Room
from saccade.selection.plan import DevicePlan
from saccade_contrib.calibrations import ChannelMeans
from saccade_contrib.channels import CALIBRATION, CHANNELS_BY, PROMPT_ROWS, SOURCES, around, heaviest_channels


@dataclass(frozen=True)
class SparseKeys(BestKeys):
    """What ``DoubleSparsity`` reads."""

    quantize_query: bool = False

    def why_not(self, spec: PlanSpec) -> str | None:
        return "no kernel of recorded steps quantizes queries" if self.quantize_query else None


@dataclass(frozen=True)
class DoubleSparsity(WholeMethod):
    """The ``k`` keys (a number, or a fraction of the visible ones) of highest label score, ties to the lower index. A
    label is the share ``channels`` of a key's channels, quantized to ``bits`` per token: code = round((x - low) / step)
    with step = (greatest - least) / (2^bits - 1); 16 leaves them as they are.
    ``quantize_query`` does the same to each head's query, as the published code does; the paper speaks of keys.

    Channels are those of greatest mean |q k| (``by``; ``q`` or ``k`` alone) over a calibration text, once per model:
    ``saccade calibrate channels``. ``source=prompt`` takes them from each prompt instead. Labels are shared by a group;
    ``unit`` says whether its query heads share tokens too, by their mean score. The first ``dense_layers`` layers are
    dense. The published evaluation applies it to prefill as well; here prefill is the prefill method's.
    Rows of up to ``dense_upto`` keys read everything.
    """

    name: ClassVar[str] = "double_sparsity"
    paper: ClassVar[str] = "Double Sparsity, arXiv:2408.07092"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    calibrations: ClassVar[Mapping[str, type]] = {CALIBRATION: ChannelMeans}
    measured: ClassVar[Measured | None] = Measured(
        "double_sparsity(k={value}, source=prompt, dense_layers=0)",
        "share",
        summary=0.0625,
        ladder="double_sparsity(source=prompt, dense_layers=0, k=0.01|0.02|0.0625|0.125)",
    )

    k: float = 0.0625
    channels: float = 0.25
    bits: int = 4
    by: str = "qk"
    source: str = "offline"
    unit: str = "kv_head"
    dense_layers: int = 2
    sinks: int = 0
    local: int = 0
    quantize_query: bool = False

    def __post_init__(self) -> None:
        require_budget("k", self.k)
        require_number("channels", self.channels, 0.001, 1.0)
        require_choice("bits", self.bits, (2, 4, 8, WHOLE_BITS))
        require_choice("by", self.by, CHANNELS_BY)
        require_choice("source", self.source, SOURCES)
        require_choice("unit", self.unit, ("q_head", "kv_head"))
        require_choice("quantize_query", self.quantize_query, (False, True))
        for name in ("dense_layers", "sinks", "local"):
            require_whole(name, getattr(self, name), 0)
        self.check_dense_upto()
        if self.source == "prompt":
            object.__setattr__(self, "tail_rows", PROMPT_ROWS)

    @property
    def calibration(self) -> str | None:
        return CALIBRATION if self.source == "offline" else None

    def begin(self, segment: Chunk) -> Labels | None:
        if segment.layer < self.dense_layers:
            return None
        count = self._count(segment.q.shape[-1])
        labels = Labels(heaviest_channels(segment, self.by, count, self.source), self.bits)
        labels.extend(segment.kv)
        return labels

    def budget(self, visible: int) -> int:
        """Keys that a row with ``visible`` keys reads."""
        return visible if visible <= self.dense_upto else max(budget_keys(self.k, visible), self.sinks + self.local)

    def hidden_by(self, keys: int) -> str | None:
        hidden = budget_keys(self.k, keys) < self.sinks + self.local
        return f"sinks+local={self.sinks + self.local}" if hidden else super().hidden_by(keys)

    def _count(self, head_dim: int) -> int:
        return max(1, round(self.channels * head_dim))

    def device_plan(self, spec: PlanSpec) -> DevicePlan | None:
        units = spec.heads if self.unit == "q_head" else spec.kv_heads
        room = Room.of(self.k, self.sinks + self.local).at_least(self.dense_upto)
        reading = SparseKeys(units, room, self._count(spec.head_dim), self.bits, self.quantize_query, method=self)
        return DevicePlan.alike(self, spec, reading, self.dense_layers)

    def whole_upto(self, opening: Opening) -> int:
        return max(self.dense_upto, int(self.k) if self.k >= 1 else 0, self.sinks + self.local)

    def device_state(self, opening: Opening) -> DeviceState:
        return RecordedLabels(opening, opening.states, self)

    def select_decode(self, query: Query, state: Any) -> Selection:
        shape = query.shape
        count = self.budget(shape.k_len)
        if query.layer < self.dense_layers:
            return Dense(shape)
        state.extend(query.kv)
        if count >= shape.k_len:
            return Dense(shape)
        query.cost.estimated += shape.k_len
        last = shape.k_len - self.local
        bits = self.bits if self.quantize_query else WHOLE_BITS
        best = state.top(query.q[:, 0], self.unit, count - self.sinks - self.local, self.sinks, last, bits)
        return around(shape, best, self.sinks, last)
