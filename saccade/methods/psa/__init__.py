"""PSA: blocks in order of criticality until the weight still unread cannot matter."""

from saccade.methods.psa.method import PSA

__all__ = ["PSA"]
