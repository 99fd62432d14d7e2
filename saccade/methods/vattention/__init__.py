"""vAttention: exact keys, and a uniform sample of the others as large as their variance asks for."""

from saccade.methods.vattention.method import VAttention

__all__ = ["VAttention"]
