"""Dense attention: every key, both phases. What all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from saccade.methods.base import Method
from saccade.methods.device_state import Opening
from saccade.selection.forms import MOST, PlanSpec
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Everything


@dataclass(frozen=True)
class DenseMethod(Method):
    """Read everything."""

    name: ClassVar[str] = "dense"
    is_dense: ClassVar[bool] = True
    means_dense: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    def whole_upto(self, opening: Opening) -> int:
        return MOST

    def device_plan(self, spec: PlanSpec) -> DevicePlan:
        return DevicePlan.alike(self, spec, Everything())
