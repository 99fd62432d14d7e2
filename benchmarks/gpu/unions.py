"""What a step has to read at least where query heads that share a KV head read keys of their own."""

from __future__ import annotations

import torch

from saccade.engine.watch.observe import AttentionCall
from saccade.selection import Dense, Tokens


class Unions:
    """An observer (engine.watch.observe) of decode calls. ``listed`` counts keys of KV heads as densities do, each by
    the share of its query heads that read it; ``read`` counts each that any of them reads, once. ``known``: all calls
    read lists of keys or everything; of other selections nothing is counted."""

    def __init__(self) -> None:
        self.listed, self.read, self.known = 0.0, 0, True

    def __call__(self, call: AttentionCall) -> None:
        self.add(call.selection)

    def add(self, selection: object) -> None:
        """``selection`` of one row."""
        if isinstance(selection, Dense):
            keys = selection.shape.k_len * selection.shape.kv_heads
            self.listed, self.read = self.listed + keys, self.read + keys
        elif isinstance(selection, Tokens):
            units, shape = selection.units, selection.shape
            each = units / shape.kv_heads
            owner = torch.arange(units, device=selection.offsets.device).repeat_interleave(selection.offsets.diff())
            keys = (owner // max(1, units // shape.kv_heads)) * shape.k_len + selection.indices.long()
            self.listed += keys.numel() / each
            self.read += int(torch.unique(keys).numel() / min(1.0, each))
        else:
            self.known = False

    @property
    def share(self) -> float:
        """``read`` by ``listed``: 1 where a KV head's query heads read the same, and where that is not known."""
        return self.read / self.listed if self.known and self.listed else 1.0
