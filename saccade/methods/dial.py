"""What of a method makes it read more, for a controller that keeps answers close to dense ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.methods.base import Method

SMALL = 1e-3  # of what a share leaves, or of an error, before a dial is at its end


@dataclass(frozen=True)
class Dial:
    """``option`` of a method. ``kind``: ``share``, of which 1 reads everything; ``keys``, a budget (a number, or a
    fraction of the visible keys), or ``error``, of which 0 does."""

    option: str
    kind: str

    def turned(self, method: Method, place: float, longest: int) -> Method:
        """``method`` with the dial at ``place``: 0 is the method as it is, 1 and more reads everything of contexts of
        up to ``longest`` keys. Between them equal ways multiply what is left out, or read, by equal factors."""
        if place <= 0:
            return method
        value: Any = getattr(method, self.option)
        if self.kind == "share":
            value = 1.0 if place >= 1 else 1.0 - (1.0 - value) * SMALL**place
        elif self.kind == "error":
            value = 0.0 if place >= 1 else value * SMALL**place
        elif place >= 1:
            value = max(longest, value)
        elif value < 1:
            value = float(value ** (1.0 - place))
        else:
            value = max(value, round(value * (max(longest, value) / value) ** place))
        return replace(method, **{self.option: value})
