"""CIS: similar queries near each other share the keys that one of them retrieved."""

from saccade.methods.cis.method import CIS

__all__ = ["CIS"]
