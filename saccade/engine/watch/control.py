"""Holding agreement with dense at a target: audited steps move the dial of a method.

After each audited step the dial goes up by ``GAIN * target`` if the step's likeliest token was not dense's, and down by
``GAIN * (1 - target)`` if it was: at once up, slowly down. This is adaptive conformal inference (Gibbs and Candes,
arXiv:2106.00170) with the dial in the place of a quantile. Whatever the stream does, among any n audited steps in a row
at most ``(1 - target) * n + (1 + GAIN) / GAIN`` disagree, because at its end the dial reads everything and no step
disagrees (their Proposition 4.1): 0.0096 above the target's share among 3,000.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from saccade.engine.watch.estimates import Share
from saccade.errors import RequestError
from saccade.methods.base import Method
from saccade.methods.registry import KNOWN

GAIN = 0.036
PLACES = 64  # of the dial: a method's options take so many values at most
WINDOW = 3000  # audited steps that agreement is told of
RECENT = 200  # by which a drift is seen to begin and to end
MOST = 64  # policies that are controlled at once


class TargetControl:
    """The dial of ``method``, for contexts of up to ``longest`` keys. ``place`` 0 is the method as it was asked for.
    RequestError for a method without a dial."""

    def __init__(self, method: Method, target: float, longest: int) -> None:
        if method.dial is None:
            able = ", ".join(sorted(name for name, part in KNOWN.items() if getattr(part, "dial", None) is not None))
            raise RequestError(f"target={target:g}: '{method.name}' has no dial to hold it with; those that do: {able}")
        self.asked, self.dial, self.target, self.longest = method, method.dial, target, longest
        self.place = 0.0
        self.audited = 0
        self.last_drift: int | None = None  # audited steps that the last drift lasted
        self._drift: int | None = None  # since the one that goes on began
        self._window: deque[bool] = deque(maxlen=WINDOW)
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._methods: dict[int, Method] = {}

    @property
    def method(self) -> Method:
        """The method with the dial where it stands, rounded up."""
        number = min(PLACES, -int(-self.place * PLACES // 1))
        if number not in self._methods:
            self._methods[number] = self.dial.turned(self.asked, number / PLACES, self.longest)
        return self._methods[number]

    def observe(self, agrees: bool) -> None:
        """A step was audited."""
        down, up = GAIN * (1.0 - self.target), GAIN * self.target
        self.place = max(0.0, self.place - down if agrees else self.place + up)
        self.audited += 1
        self._window.append(agrees)
        self._recent.append(agrees)
        if self._drift is not None:
            self._drift += 1
        elif not agrees and len(self._recent) == RECENT:
            hits, target = sum(self._recent), self.target
            if hits < RECENT * target - 3 * (RECENT * target * (1 - target)) ** 0.5:  # no chance would have it so
                self._drift = RECENT - hits
        if self._drift is not None and sum(self._recent) >= RECENT * self.target:
            self.last_drift, self._drift = self._drift, None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, see docs/audit.md."""
        return {
            "target": self.target,
            "option": self.dial.option,
            "value": getattr(self.method, self.dial.option),
            "place": round(min(1.0, self.place), 4),
            "audited_steps": self.audited,
            "agreement": Share(len(self._window), sum(self._window)).as_dict(),
            "drifting": self._drift is not None,
            "last_drift_steps": self.last_drift,
        }


class Controls:
    """The controls of an engine, by policy and target: what one request learnt holds for the next one."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._controls: OrderedDict[tuple[Method, float], TargetControl] = OrderedDict()

    def of(self, method: Method, target: float) -> TargetControl:
        key = method, target
        if key not in self._controls:
            self._controls[key] = TargetControl(method, target, self._longest)
            while len(self._controls) > MOST:
                self._controls.popitem(last=False)
        self._controls.move_to_end(key)
        return self._controls[key]
