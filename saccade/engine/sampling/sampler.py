"""Choosing the next token of one request from its logits."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.engine.sampling.acceptance import Proposal, decided, draw
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.sampling.steering import Steering
from saccade.engine.steps.row_sampling import RowSampling, TokenCounts
from saccade.errors import ModelError, RequestError
from saccade.models.warpers import Warpers
from saccade.randomness import fresh_seed, uniform

NOT_FINITE = (
    "the model's logits are not finite: its weights are broken, or its activations overflow in this dtype; "
    "try dtype='float32'"
)


class Sampler:
    """How one request chooses tokens. It keeps a seed and no generator: a token's draw depends on the seed, the sample
    and the token's place alone, whatever else is in the batch and however often the step runs."""

    def __init__(self, params: SamplingParams, steering: Steering | None = None) -> None:
        self.params = params
        self.steering = Steering(params) if steering is None else steering
        self.warpers = Warpers(
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
        )
        self.seed = fresh_seed() if params.seed is None else params.seed
        # Whether the next token is the likeliest, whatever came before, and nothing else of the logits is wanted.
        plain = params.repetition_penalty == 1.0 and self.steering.neutral
        self.takes_likeliest = params.greedy and plain and params.logprobs is None
        self._row = RowSampling(
            temperature=self.warpers.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            seed=self.seed,
            sample=params.sample,
            logprobs=params.logprobs,
            biases=self.steering.bias_tensors(),
        )
        self._seen = TokenCounts() if params.repetition_penalty != 1.0 else None
        self._answer = TokenCounts() if self.steering.counts else None

    def drafting(self) -> Sampler:
        """One that draws as this one does, but for the constraint, whose matcher is to see the answer alone."""
        steering = copy.copy(self.steering)
        steering.matcher, steering.neutral = None, not steering.steered
        made = Sampler(self.params, steering)
        made.seed, made._row = self.seed, self._row._replace(logprobs=None)
        return made

    def weights(self, ids: list[int], logits: Tensor) -> Tensor:
        """The distribution that a token is drawn from: float64 [vocab], of logits fp32 [vocab]."""
        return torch.softmax(self._sound(ids, logits).double(), -1)

    def sample(self, ids: list[int], logits: Tensor, position: int, proposal: Proposal | None = None) -> int:
        """The token at ``position`` of the sequence: ``ids`` the tokens so far, ``logits`` fp32 [vocab] -> token id.
        Greedy ties go to the lower id. ``proposal``: what a draft drew there, to be kept or not (.acceptance).
        ModelError where the greatest logit is no finite number, RequestError where the
        sampling parameters make it so: some token would come out of it, and mean nothing."""
        scores = self._sound(ids, logits)
        if self.params.greedy:
            return int(_values(scores).argmax())
        weights, sample = torch.softmax(scores.double(), -1), self.params.sample
        if proposal is not None:
            return decided(proposal, weights, self.seed, sample, position)
        return draw(weights, uniform(self.seed, sample, position))

    def _sound(self, ids: list[int], logits: Tensor) -> Tensor:
        """:meth:`processed`, or what :meth:`sample` raises."""
        if not math.isfinite(_values(logits).max()):
            raise ModelError(NOT_FINITE)
        scores = self.processed(ids, logits)
        if scores is not logits and not math.isfinite(_values(scores).max()):
            raise RequestError(
                f"the logits are not finite once repetition_penalty={self.params.repetition_penalty!r} and "
                f"temperature={self.params.temperature!r} are applied; choose values nearer to 1"
            )
        return scores

    def row(self, ids: list[int]) -> RowSampling | None:
        """:meth:`sample` of the token after ``ids`` as plain data; None for an answer under a constraint, whose matcher
        has to see the tokens one by one."""
        if self.steering.matcher is not None:
            return None
        if self.chooses_alike:
            return self._row
        answer = ids[self.steering.answer_start :]
        return self._row._replace(
            seen=None if self._seen is None else self._seen.of(ids)[0],
            answer=None if self._answer is None else self._answer.of(answer),
            banned=tuple(self.steering.banned(answer)),
        )

    @property
    def chooses_alike(self) -> bool:
        """Whether :meth:`row` is the same after every token."""
        steering = self.steering
        return steering.matcher is None and self._seen is None and self._answer is None and not steering.bans

    def processed(self, ids: list[int], logits: Tensor) -> Tensor:
        """The logits that a token is drawn from: ``ids`` the whole sequence so far, fp32 [vocab] -> fp32 [vocab].
        RequestError where every token is forbidden."""
        scores = self.warpers.repeat(ids, self.steering.restrict(ids, logits))
        scores = self.steering.penalise(ids, scores)
        if not self.steering.neutral and float(scores.max()) == -math.inf:
            raise RequestError(
                "bad_words, min_tokens and the constraint forbid every token that the model knows; allow some"
            )
        return self.warpers.warp(scores)


def _values(logits: Tensor) -> np.ndarray[Any, Any]:
    """For numpy, which finds the greatest by itself; torch takes longer and wakes threads beside those of kernels."""
    return logits.cpu().numpy()


def top_logprobs(logits: Tensor, chosen: int, count: int) -> dict[int, tuple[float, int]]:
    """``{token: (logprob, rank)}`` of the ``count`` likeliest tokens and the chosen one, likeliest first."""
    return row_logprobs(logits[None], [chosen], count)[0]


def row_logprobs(logits: Tensor, chosen: list[int], count: int) -> list[dict[int, tuple[float, int]]]:
    """``top_logprobs`` for each row of ``logits`` [n, vocab] and its chosen token."""
    logprobs = torch.log_softmax(logits, -1)
    own = logprobs.gather(-1, torch.tensor(chosen, device=logits.device)[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    values, tokens = torch.topk(logprobs, min(count, logprobs.shape[-1]))
    results = []
    rows = zip(chosen, own[:, 0].tolist(), ranks.tolist(), values.tolist(), tokens.tolist())
    for token, logprob, rank, top, ids in rows:
        entries = {other: (value, place) for place, (other, value) in enumerate(zip(ids, top), start=1)}
        entries.setdefault(token, (logprob, rank))
        results.append(entries)
    return results
