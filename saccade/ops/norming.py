"""How RMS norms of modules that are not Llama's differ: what kernels of either device are told."""

from __future__ import annotations

from typing import NamedTuple

ROUNDED, PLUS_ONE, WHOLE = "rounded", "plus_one", "whole"  # what weights multiply: rounded first, by 1 more, as it is


class Norming(NamedTuple):
    """How a module norms: what its weights do (:data:`ROUNDED`, ...), whether a gate's silu comes first or last, and
    ``groups`` of channels, each of which is normed by itself."""

    weights: str
    gates_first: bool = False
    groups: int = 1
