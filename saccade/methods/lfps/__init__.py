"""LFPS: candidates predicted from what a head attended to before."""

from saccade.methods.lfps.method import LFPS

__all__ = ["LFPS"]
