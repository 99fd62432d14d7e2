"""Which device plan a policy has, and which form: what recorded steps are grouped and keyed by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from saccade.methods.base import Method, WindowMethod
from saccade.methods.policy import Policy
from saccade.methods.verified import Verified
from saccade.models.interface import ModelSpec
from saccade.ops.triton.batched_reading import why_not
from saccade.selection import Cone
from saccade.selection.forms import Summarized
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Reading
from saccade.selection.visible import rows_within

PLANS = 4096  # of methods used last


@dataclass(frozen=True, eq=False)
class Planned:
    """A method's plan and the number of its form; or why there is none."""

    plan: DevicePlan | None
    form: int = 0
    why_not: str | None = None
    cones: tuple[Cone | None, ...] = ()  # the policy's window, a layer each


class DevicePlans:
    """The plans of the methods used last, on a model of shape ``spec``."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._forms: dict[tuple[Reading, ...], int] = {}
        self._plan = lru_cache(maxsize=PLANS)(self._planned)
        self._verifying = lru_cache(maxsize=PLANS)(self._planned_verifying)
        self._same: dict[tuple[int, int], tuple[Method, WindowMethod | None, Planned]] = {}

    @property
    def forms(self) -> list[tuple[Reading, ...]]:
        """By their numbers."""
        return list(self._forms)

    def of(self, policy: Policy) -> Planned:
        """How a decode row under ``policy`` reads."""
        return self._of(policy.decode, policy.window)

    def verifying(self, policy: Policy, each: int) -> Planned:
        """How a request verifies at most ``each`` rows at once, its draft's summaries of blocks kept."""
        method = policy.decode
        assert isinstance(method, Verified)
        plan = self._of(method.draft, policy.window).plan
        return self._verifying(method, each, None if plan is None else plan.summarized)

    def prefilling(self, each: int) -> DevicePlan:
        """How at most ``each`` rows of a dense prefill read."""
        plan = self._verifying(Policy().decode, each, None).plan
        assert plan is not None
        return plan

    def _of(self, method: Method, window: WindowMethod | None) -> Planned:
        """``_plan``, without asking every number of the method for its hash twice a step."""
        key = id(method), id(window)
        known = self._same.get(key)
        if known is None or known[0] is not method or known[1] is not window:
            if len(self._same) >= PLANS:
                self._same.clear()
            known = self._same[key] = method, window, self._plan(method, window)
        return known[2]

    def _planned(self, method: Method, window: WindowMethod | None = None) -> Planned:
        spec = self.spec
        plan = method.device_plan(spec)
        if plan is None:
            return Planned(None, why_not=f"'{method.text}': {method.rows_only or 'no device plan for this model'}")
        cones = tuple(None if window is None else window.at(layer, spec.layers) for layer in range(spec.layers))
        if window is not None:
            plan = window.narrowed(plan)
            if plan is None:
                return Planned(None, why_not=f"the kernels of '{method.text}' know no windows")
        for reading in dict.fromkeys(plan.layers):
            if (reason := why_not(reading, spec)) is not None:
                return Planned(None, why_not=f"'{method.text}': {reason}")
        return Planned(plan, self._number(plan), cones=cones)

    def _planned_verifying(self, method: Method, each: int, kept: Summarized | None) -> Planned:
        plan = DevicePlan.of(method, [rows_within(window, each, kept) for window in self.spec.windows])
        return Planned(plan, self._number(plan))

    def _number(self, plan: DevicePlan) -> int:
        return self._forms.setdefault(plan.form, len(self._forms))
