"""Which device plan a policy has, and which form: what recorded steps are grouped and keyed by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from saccade.methods.base import Method, WindowMethod
from saccade.methods.policy import Policy
from saccade.methods.verified import Verified
from saccade.models.interface import ModelSpec
from saccade.ops.triton.batched_reading import why_not
from saccade.selection import Cone
from saccade.selection.forms import Summarized
from saccade.selection.levels import Levels
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Reading
from saccade.selection.visible import rows_within

PLANS = 4096  # of methods used last


@dataclass(frozen=True, eq=False)
class Planned:
    """A method's plan at one level and the number of its form; or why there is none. ``acting``: the layers where the
    method decides, where these are not all."""

    plan: DevicePlan | None
    form: int = 0
    why_not: str | None = None
    cones: tuple[Cone | None, ...] = ()  # the policy's window, a layer each
    acting: tuple[int, ...] | None = None


class DevicePlans:
    """The plans of the methods used last, on a model of shape ``spec``. What means to read everything has one plan for
    all rows; others have one for each level (selection/levels.py)."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.levels = spec, Levels(spec.windows)
        self._forms: dict[tuple[Reading, ...], int] = {}
        self._plan = lru_cache(maxsize=PLANS)(self._planned)
        self._verifying = lru_cache(maxsize=PLANS)(self._planned_verifying)
        self._same: dict[tuple[int, int, int | None], tuple[Method, WindowMethod | None, Planned]] = {}

    @property
    def forms(self) -> list[tuple[Reading, ...]]:
        """By their numbers."""
        return list(self._forms)

    def of(self, policy: Policy, length: int) -> Planned:
        """How a decode row under ``policy`` that sees ``length`` keys reads."""
        return self._of(policy.decode, policy.window, self._level(policy.decode, length))

    def among(self, policy: Policy, shortest: int, longest: int) -> list[Planned]:
        """How rows of ``shortest`` to ``longest`` keys read: each plan once."""
        first, last = (self._level(policy.decode, length) or 0 for length in (shortest, longest))
        found = [self.of(policy, shortest)]
        return found + [self._of(policy.decode, policy.window, level) for level in range(first + 1, last + 1)]

    def stays(self, policy: Policy, length: int, later: int) -> bool:
        """Whether rows of ``length`` and of ``later`` keys have one plan."""
        return self._level(policy.decode, length) == self._level(policy.decode, later)

    def replaying(self, length: int) -> Planned:
        """How a row of ``length`` keys reads densely by the numbers of its own plan: windows that hide nothing are
        left out, for those are the method's layers."""
        return self._of(Policy().decode, None, self.levels.of(length))

    def verifying(self, policy: Policy, each: int, length: int) -> Planned:
        """How a request of ``length`` keys verifies at most ``each`` rows at once, its draft's summaries of blocks
        kept."""
        method = policy.decode
        assert isinstance(method, Verified)
        plan = self._of(method.draft, policy.window, self._level(method.draft, length)).plan
        return self._verifying(method, each, None if plan is None else plan.summarized)

    def prefilling(self, each: int) -> DevicePlan:
        """How at most ``each`` rows of a dense prefill read."""
        plan = self._verifying(Policy().decode, each, None).plan
        assert plan is not None
        return plan

    def _level(self, method: Method, length: int) -> int | None:
        """None: that of all rows."""
        return None if method.means_dense else self.levels.of(length)

    def _of(self, method: Method, window: WindowMethod | None, level: int | None) -> Planned:
        """``_plan``, without asking every number of the method for its hash twice a step."""
        key = id(method), id(window), level
        known = self._same.get(key)
        if known is None or known[0] is not method or known[1] is not window:
            if len(self._same) >= PLANS:
                self._same.clear()
            known = self._same[key] = method, window, self._plan(method, window, level)
        return known[2]

    def _planned(self, method: Method, window: WindowMethod | None, level: int | None) -> Planned:
        spec, levels, acting = self.spec, self.levels, None
        plan = method.device_plan(spec if level is None else replace(spec, windows=levels.windows_at(level)))
        if plan is None:
            return Planned(None, why_not=f"'{method.text}': {method.rows_only or 'no device plan for this model'}")
        if level:
            plan, acting = replace(plan, name=f"{plan.name}, level {level}"), levels.acting(level)
        cones = tuple(None if window is None else window.at(layer, spec.layers) for layer in range(spec.layers))
        if window is not None:
            plan = window.narrowed(plan)
            if plan is None:
                return Planned(None, why_not=f"the kernels of '{method.text}' know no windows")
        for reading in dict.fromkeys(plan.layers):
            if (reason := why_not(reading, spec)) is not None:
                return Planned(None, why_not=f"'{method.text}': {reason}")
        return Planned(plan, self._number(plan), cones=cones, acting=acting)

    def _planned_verifying(self, method: Method, each: int, kept: Summarized | None) -> Planned:
        plan = DevicePlan.of(method, [rows_within(window, each, kept) for window in self.spec.windows])
        return Planned(plan, self._number(plan))

    def _number(self, plan: DevicePlan) -> int:
        return self._forms.setdefault(plan.form, len(self._forms))
