"""MagicPIG: keys sampled by locality-sensitive hashing."""

from saccade_contrib.magicpig.method import MagicPIG

__all__ = ["MagicPIG"]
