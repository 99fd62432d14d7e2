"""Methods decide which keys; policies say which method serves which phase of a request."""

from saccade.methods.base import Chunk, Cost, Method, Query
from saccade.methods.outside import register
from saccade.methods.policy import Policy, parse_method
from saccade.methods.registry import METHODS
from saccade.methods.scored import ScoredBlocks

__all__ = ["METHODS", "Chunk", "Cost", "Method", "Policy", "Query", "ScoredBlocks", "parse_method", "register"]
