"""Attention over a selection, on backends that must agree."""

from saccade.ops.attend import attend, run
from saccade.ops.call import Call, Result
from saccade.ops.merge import merge_state

__all__ = ["Call", "Result", "attend", "merge_state", "run"]
