"""Methods decide which keys; policies say which method serves which phase of a request."""

from saccade.methods.base import Chunk, Cost, Method, Query
from saccade.methods.policy import Policy, parse_method
from saccade.methods.registry import METHODS

__all__ = ["METHODS", "Chunk", "Cost", "Method", "Policy", "Query", "parse_method"]
