"""Contexts that are read whole because choosing among so few keys costs more than reading them (``dense_upto``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from saccade.methods.base import Method
from saccade.methods.device_state import Opening
from saccade.methods.options import require_whole


@dataclass(frozen=True)
class WholeMethod(Method):
    """Base of methods whose decode rows of up to ``dense_upto`` keys read everything; 0 lets them choose at any
    length. Their choice is made in Python, a layer at a time: a step of 88 keys takes 15 to 22 times dense's calls.
    Rows that read everything are in the one call a step (Method.whole_upto), and prefill knows nothing of it."""

    dense_upto: int = field(default=256, kw_only=True)

    def check_dense_upto(self) -> None:
        """PolicyError for a ``dense_upto`` that is no whole number from 0."""
        require_whole("dense_upto", self.dense_upto, 0)

    def whole_upto(self, opening: Opening) -> int:
        return self.dense_upto

    def hidden_by(self, keys: int) -> str | None:
        return f"dense_upto={self.dense_upto}" if keys <= self.dense_upto else None
