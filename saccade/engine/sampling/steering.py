"""Changes of a request's logits besides temperature, top-k and top-p: forbidden tokens, tokens forbidden until a length
is reached, and biases. The order is vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from saccade.engine.sampling.masks import Following, Masks, Matcher
from saccade.engine.sampling.params import SamplingParams
from saccade.errors import RequestError

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel


class Constraint(Protocol):
    """What an answer must follow, a grammar say. Many requests may have the same one."""

    def begin(self) -> Matcher:
        """A matcher for one answer that begins. It must not take long: what does belongs into its first mask."""
        ...


class Steering:
    """``answer_start``: where in the sequence the answer begins. ``ends``: tokens that may not come before
    ``min_tokens``. ``words``: each a list of tokens whose last one may not follow the others. ``matcher``: which tokens
    may come at all."""

    def __init__(
        self,
        params: SamplingParams,
        answer_start: int = 0,
        ends: Sequence[int] = (),
        words: Sequence[Sequence[int]] = (),
        matcher: Following | None = None,
    ) -> None:
        self.params, self.answer_start, self.words, self.matcher = params, answer_start, words, matcher
        self.end_tokens = list(ends)
        self.biases = params.logit_bias or {}
        self.counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.steered = bool(self.words or params.min_tokens or self.biases or self.counts)  # without the matcher
        self.neutral = not self.steered and matcher is None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        model: LoadedModel,
        constraint: Constraint | None = None,
        masks: Masks | None = None,
    ) -> Steering:
        """For one request of a model, which sets ``answer_start``. ``masks``: where those of ``constraint`` are
        computed. RequestError for tokens that the model lacks."""
        vocab = model.spec.vocab_size
        for token in params.logit_bias or ():
            if token >= vocab:
                raise RequestError(f"logit_bias names token {token}; this model has tokens 0 to {vocab - 1}")
        ends = [end for end in {*model.eos_token_ids, *params.stop_token_ids} if 0 <= end < vocab]
        words = model.tokenizer.words(params.bad_words) if params.bad_words else []
        if constraint is None or masks is None:
            return cls(params, 0, ends, words)
        return cls(params, 0, ends, words, Following(constraint.begin(), masks))

    def restrict(self, ids: list[int], logits: Tensor) -> Tensor:
        """Before the repetition penalty: the constraint, bad words, end tokens that come too early, biases. ``ids`` the
        whole sequence, ``logits`` fp32 [vocab]."""
        if self.neutral:
            return logits
        logits = logits.clone()
        answer = ids[self.answer_start :]
        if self.matcher is not None:
            logits[~self.matcher.allowed(answer)] = -torch.inf
        if banned := self.banned(answer):
            logits[banned] = -torch.inf
        if (biases := self.bias_tensors()) is not None:
            tokens, values = (part.to(logits.device) for part in biases)
            logits[tokens] += values.to(logits.dtype)
        return logits

    def ends(self, answer: list[int], end: bool) -> bool:
        """Whether ``answer`` ends with its last token, which an end token (``end``) or a stop token is. Under a
        constraint such a token may be what the constraint asks for next: then it ends nothing."""
        return self.matcher is None or self.matcher.accepts(answer[:-1] if end else answer)

    @property
    def bans(self) -> bool:
        """Whether :meth:`banned` may name tokens."""
        return bool(self.words or self.params.min_tokens)

    def banned(self, answer: list[int]) -> list[int]:
        """Tokens that may not come after ``answer``: they would end a bad word, or the answer too early."""
        ends = self.end_tokens if len(answer) < self.params.min_tokens else []
        last = [word[-1] for word in self.words if answer[len(answer) - len(word) + 1 :] == list(word[:-1])]
        return [*ends, *last]

    def bias_tensors(self) -> tuple[Tensor, Tensor] | None:
        """``logit_bias`` as tokens int64 [n] and what is added to their logits fp32 [n]; None without one."""
        if not self.biases:
            return None
        values = torch.tensor(list(self.biases.values()), dtype=torch.float32)
        return torch.tensor(list(self.biases), dtype=torch.long), values

    def penalise(self, ids: list[int], logits: Tensor) -> Tensor:
        """After the repetition penalty: frequency and presence, over the tokens of the answer."""
        if not self.counts:
            return logits
        answer = torch.tensor(ids[self.answer_start :], dtype=torch.long, device=logits.device)
        counts = torch.bincount(answer, minlength=logits.shape[-1])
        logits = logits - self.params.frequency_penalty * counts
        return logits - self.params.presence_penalty * (counts > 0)
