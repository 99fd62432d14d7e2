"""What LFPS knows of a sequence at one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.methods.fitting import Fitting, Sizes
from saccade.methods.lfps.tables import ScoreTables
from saccade.methods.state import MethodState


@dataclass
class LFPSState(MethodState):
    replaced: ClassVar[frozenset[str]] = frozenset({"spread", "idle"})

    tables: ScoreTables
    mean_key: Tensor  # fp32 [kv_heads, head_dim], over all keys but the sinks, as is mean_value
    mean_value: Tensor
    counted: int  # keys in the means
    spread: Tensor  # fp32 [heads]: variance of the last prompt row's logits over the square of its query's norm
    seen: int  # the last row that the tables know of
    idle: Tensor | None = None  # bool [heads]: who was bypassed in the step at hand

    def fit(self, sizes: Sizes, fitting: Fitting) -> None:
        """See MethodState."""
        for name in ("mean_key", "mean_value"):
            fitting.tensor(name, getattr(self, name), torch.float32, sizes.kv_heads, sizes.head_dim)
        fitting.tensor("spread", self.spread, torch.float32, sizes.heads)
        if self.idle is not None:
            fitting.tensor("idle", self.idle, torch.bool, sizes.heads)
        fitting.within("counted", self.counted, 0, sizes.length)
        fitting.within("seen", self.seen, -1, sizes.length - 1)
        known, room = self.seen + 1 - self.tables.first, self.tables.vertical.shape[-1]
        fitting.require(known <= room, f"knows of {known} positions and has room for {room}")

    def holds(self, length: int) -> bool:
        return length == self.seen + 1

    def learnt(self) -> int:
        return self.seen + 1


@dataclass
class TurnBefore(MethodState):
    """What the turn before left, for ``history="keep"``; nothing where tokens were cut off since."""

    state: LFPSState | None
