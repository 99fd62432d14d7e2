"""RocketKV: a coarse eviction when a prefill ends, then in every step blocks of what is left."""

from saccade.methods.rocketkv.method import RocketKept, RocketKV

__all__ = ["RocketKV", "RocketKept"]
