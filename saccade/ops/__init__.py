"""Attention over a selection, on backends that must agree."""

from saccade.ops.attend import Trace, attend
from saccade.ops.merge import merge_state

__all__ = ["Trace", "attend", "merge_state"]
