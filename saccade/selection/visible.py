"""All keys within a window, as rows read them that are counted by their length alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from saccade.selection.forms import Known
from saccade.selection.readings import Everything
from saccade.selection.window import Cone


@dataclass(frozen=True)
class VisibleKeys(Everything):
    """All keys, as far as ``cone`` shows them, of rows that count what they read by their length."""

    cone: Cone | None = None

    def cost(self, length: int, step: int = 0) -> Known:
        assert self.cone is not None
        hidden = _hidden(self.cone, (length - 1) // self.cone.block_size)
        return Known("band" if hidden else "dense", length - hidden, 0)


@lru_cache(maxsize=4096)
def _hidden(cone: Cone, block: int) -> int:
    """Keys that ``cone`` hides from each row of a block of its grid."""
    return max(0, cone.start(block * cone.block_size) - cone.sink_keys)
