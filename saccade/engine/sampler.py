"""Choosing the next token of one request from its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.params import SamplingParams
from saccade.models.warpers import Warpers


class Sampler:
    """Holds one request's generator, so that its draws never depend on what else is in the batch."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.warpers = Warpers(
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
        )
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)

    def sample(self, ids: list[int], logits: Tensor) -> int:
        """``ids`` the sequence so far, ``logits`` fp32 [vocab] -> token id. Greedy ties go to the lower id."""
        scores = self.warpers.process(ids, logits)
        if self.params.greedy:
            return int(torch.argmax(scores))
        weights = torch.softmax(scores.double(), -1)
        draw = torch.rand((), generator=self.generator, dtype=torch.float64)
        cumulative = weights.cumsum(-1)
        return int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True).clamp(max=weights.numel() - 1))


def top_logprobs(logits: Tensor, chosen: int, count: int) -> dict[int, tuple[float, int]]:
    """``{token: (logprob, rank)}`` of the ``count`` likeliest tokens and the chosen one, likeliest first."""
    logprobs = torch.log_softmax(logits, -1)
    result: dict[int, tuple[float, int]] = {}
    for rank, token in enumerate(torch.topk(logprobs, min(count, logprobs.numel())).indices.tolist(), start=1):
        result[token] = (float(logprobs[token]), rank)
    if chosen not in result:
        result[chosen] = (float(logprobs[chosen]), int((logprobs > logprobs[chosen]).sum()) + 1)
    return result
