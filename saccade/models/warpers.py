"""Logits processing by transformers' own processors, one row at a time, so that every request has its own settings.

Top-p is restated here, to the same result: transformers sorts the vocabulary with its indices, which took most of a
sampled token's time on a CPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class Warpers:
    """``process(ids, logits)``: repetition penalty, then temperature, top-k, top-p and min-p in transformers' order;
    :meth:`repeat` and :meth:`warp` are its two halves, between which other penalties act.

    ``temperature=0`` (greedy) applies the repetition penalty alone.
    """

    def __init__(
        self, *, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float
    ) -> None:
        self.penalty = (
            None if repetition_penalty == 1.0 else RepetitionPenaltyLogitsProcessor(float(repetition_penalty))
        )
        self.temperature = temperature
        processors = LogitsProcessorList()
        if temperature > 0:
            if temperature != 1.0:
                processors.append(TemperatureLogitsWarper(float(temperature)))
            if top_k > 0:
                processors.append(TopKLogitsWarper(top_k))
            if top_p < 1.0:
                processors.append(TopP(top_p))
            if min_p > 0.0:
                processors.append(MinPLogitsWarper(min_p))
        self.processors = processors

    def process(self, ids: list[int], logits: Tensor) -> Tensor:
        """``ids`` the whole sequence so far, ``logits`` fp32 [vocab] -> processed fp32 [vocab]."""
        return self.warp(self.repeat(ids, logits))

    def repeat(self, ids: list[int], logits: Tensor) -> Tensor:
        """The repetition penalty alone, over all of ``ids``."""
        if self.penalty is None:
            return logits
        return self.penalty(torch.tensor([ids], dtype=torch.long), logits[None].clone())[0]

    def warp(self, logits: Tensor) -> Tensor:
        """What comes after all penalties."""
        if not self.processors:
            return logits
        unread = torch.empty(1, 0, dtype=torch.long)  # these do not look at the sequence
        return self.processors(unread, logits[None].clone())[0]  # type: ignore[arg-type]


class TopP(TopPLogitsWarper):
    """transformers' rule on one row on the CPU, bit for bit. The values alone are sorted, which numpy does in a tenth
    of the time. Of tokens that are equal at the border, which transformers leaves to chance, the lower ids leave
    first."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` fp32 [1, vocab] -> the same, those that leave set to ``filter_value``."""
        rising = torch.from_numpy(np.sort(scores.numpy()))
        leaves = rising.softmax(-1).cumsum(-1) <= 1 - self.top_p
        count = int(leaves[0, : -self.min_tokens_to_keep].sum())  # the least ones: sums only grow
        if not count:
            return scores
        border = rising[0, count - 1]
        gone, equal = scores < border, (scores == border)[0].nonzero()[:, 0]
        gone[0, equal[: count - int(gone.sum())]] = True
        return scores.masked_fill(gone, self.filter_value)
