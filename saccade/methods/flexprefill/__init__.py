"""FlexPrefill: query-aware blocks or vertical and slash lines, by head and input."""

from saccade.methods.flexprefill.method import FlexPrefill

__all__ = ["FlexPrefill"]
