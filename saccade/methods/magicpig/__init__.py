"""MagicPIG: keys sampled by locality-sensitive hashing."""

from saccade.methods.magicpig.method import MagicPIG

__all__ = ["MagicPIG"]
