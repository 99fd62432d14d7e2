"""What the engine needs to know of a method that has tokens drafted and verifies them: who drafts, and how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from saccade.methods.base import Method
from saccade.methods.state import MethodState

MOST = 15  # drafted tokens of a request in one step: with the row before them a power of two
UNLEARNT = 2  # first decode rows of a turn that no draft learns from: they cost what dense rows cost, which is timed


class Verified(Method):
    """Base: rows under such a method are verified, and may be guessed by rows under ``draft``. ``tokens``: so many each
    time; 0 leaves it to the engine. ``lookup``: tokens that must agree for a look-up; 0 does without. ``carried``: the
    share of what the draft chooses that comes of the last verified row's weights."""

    draft: Method
    tokens: int
    lookup: int
    carried: float


@dataclass
class Drafted(MethodState):
    """``draft``: what the draft knows. In a state of its own, so that what it evicted binds the draft alone."""

    draft: Any

    def holds(self, length: int) -> bool:
        return isinstance(self.draft, MethodState) and self.draft.holds(length)

    def learnt(self) -> int | None:
        return self.draft.learnt() if isinstance(self.draft, MethodState) else None

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.draft.truncate(length)


def bare(state: Any) -> Any:
    """What the draft knows, of a state that a verified method keeps."""
    return state.draft if isinstance(state, Drafted) else state
