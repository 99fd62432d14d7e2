"""Pins: which parts of KV blocks are held in their slots, and how often."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Pins:
    """Counts, of each part of ``blocks`` blocks in ``layers`` layers, its holders. ``held``: parts that any sequence
    holds; ``held_in``: the same, by layer."""

    def __init__(self, layers: int, blocks: int) -> None:
        self.counts = np.zeros((layers, blocks), dtype=np.int16)
        self.held = 0
        self.held_in = [0] * layers

    def add(self, layer: int, blocks: Array) -> None:
        """Count one more holder of ``blocks`` (int ids, no id twice) of a layer."""
        pins = self.counts[layer, blocks]
        fresh = int((pins == 0).sum())
        self.held += fresh
        self.held_in[layer] += fresh
        self.counts[layer, blocks] = pins + 1

    def remove(self, layer: int, blocks: Array) -> None:
        """Count one holder less of them."""
        if len(blocks):
            pins = self.counts[layer, blocks] - 1
            self.counts[layer, blocks] = pins
            gone = int((pins == 0).sum())
            self.held -= gone
            self.held_in[layer] -= gone

    def loose(self, layers: Array | int, blocks: Array) -> Array:
        """bool like them: whether a part has no holder."""
        loose: Array = self.counts[layers, blocks] == 0
        return loose
