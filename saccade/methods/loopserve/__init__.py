"""LoopServe: a greedy choice of lines in prefill, a choice of keys made anew every few tokens in decode."""

from saccade.methods.loopserve.method import LoopServe

__all__ = ["LoopServe"]
