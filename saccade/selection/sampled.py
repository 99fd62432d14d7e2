"""Keys that were drawn at random, with what corrects for how likely each was to be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.selection.base import Selection, Shape, Tokens


@dataclass(frozen=True, eq=False)
class Sampled(Selection):
    """Token lists whose logits gain ``bias``, fp32 [nnz], before the softmax: an importance weight of exp(bias)."""

    tokens: Tokens
    bias: Tensor

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return self.tokens.shape

    @property
    def units(self) -> int:
        return self.tokens.units

    def row_mask(self, unit: int, start: int, stop: int) -> Tensor:
        return self.tokens.row_mask(unit, start, stop)

    def row_bias(self, unit: int, start: int, stop: int) -> Tensor:
        bias = torch.zeros(stop - start, self.shape.k_len, device=self.bias.device)
        for row in range(stop - start):
            at = unit * self.shape.q_len + start + row
            span = slice(int(self.tokens.offsets[at]), int(self.tokens.offsets[at + 1]))
            bias[row, self.tokens.indices[span].long()] = self.bias[span]
        return bias

    def unit_pairs(self) -> Tensor:
        return self.tokens.unit_pairs()

    def check(self) -> None:
        self.tokens.check()
        if self.bias.shape != self.tokens.indices.shape:
            raise SaccadeError(f"{self.tokens.indices.numel()} drawn keys but {self.bias.numel()} biases")
