"""A request: one sample of one prompt on its way through the engine, and what it has produced so far."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from saccade.engine.memory.sequence import Sequence, Standing
from saccade.engine.messages import StepOutput, TokenLogprob
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.sampling.sampler import Sampler
from saccade.engine.sampling.steering import Steering
from saccade.engine.sampling.stopping import StopText
from saccade.engine.steps.step import LogprobEntries
from saccade.engine.watch.audit import Audit
from saccade.engine.watch.bounds import Bounds
from saccade.engine.watch.control import TargetControl
from saccade.engine.watch.maps import Maps
from saccade.engine.watch.report import Report
from saccade.methods.policy import Policy
from saccade.models.token_texts import TokenTexts

if TYPE_CHECKING:
    from saccade.engine.drafts.speculation import Speculation


class Request:
    """One sample of one prompt. Only the engine and its scheduler hold it."""

    def __init__(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        policy: Policy,
        *,
        layers: int,
        detokenizer: Any,
        steering: Steering | None = None,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.params = params
        self.policy = policy
        self.report = Report(policy, layers)
        for part in (policy.window, policy.freeze):
            if part is not None and not part.acts(layers):
                self.report.note(f"'{part.text}' leaves a model of {layers} layers as it is")
        self.sampler = Sampler(params, steering)
        self.detokenizer = detokenizer
        self.stopper = StopText(params.stop or (), params.include_stop_str_in_output)
        self.stop_reason: int | str | None = None  # the stop string or stop token that ended it
        self.text = ""
        self.token_texts: TokenTexts | None = None  # of the answer, where log-probabilities are wanted
        self.logprobs: list[dict[int, TokenLogprob]] = []
        self.prompt_scores: dict[int, LogprobEntries] = {}  # by place in the sequence
        self.prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None  # one a prompt token, at the end
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.error_type: str | None = None  # what errors.class_name gives for it
        self.keep_kv = False  # a session's sequence stays after the request ends
        self.maps: Maps | None = None  # what was ordered to be seen of its attention
        self.final_ids: list[int] = []  # the answer, once the request ended
        self.parent: Request | None = None  # whose prompt this one waits for, to share it
        self.forks: list[Request] = []  # who waits for the prompt of this one
        self.undrafted = False  # whether its steps are to have no drafts any more: one that had them broke
        self.speculation: Speculation | None = None  # of requests under `lossless`, once they decode
        self.audit: Audit | None = None
        self.bounds: Bounds | None = None
        self.control: TargetControl | None = None  # of the method's dial
        self._decoding = policy
        self.losses = 0  # times that its keys had to be computed again because a tier lost some
        self.before: Standing | None = None  # where its session stood, to which it returns if the turn is taken back

    def begin(self, sequence: Sequence, max_length: int, decoded: int = 0) -> None:
        """Append the prompt to ``sequence``. Until now it was untouched, so that a request that cannot be made leaves
        nothing behind."""
        self.sequence = sequence
        self.kept = len(sequence.tokens)  # tokens of a session that came before
        self.rollback = (self.kept, sequence.reached)  # where a cancelled turn leaves its session
        self.first_row = sequence.reached  # of those this turn computes
        sequence.begin_turn(self.prompt, self.policy, decoded)
        self.output_start = self.sampler.steering.answer_start = len(sequence.tokens)
        limit = max_length - self.output_start
        self.max_tokens = limit if self.params.max_tokens is None else min(self.params.max_tokens, limit)
        self.report.prompt_tokens = self.output_start
        self.report.cached_tokens, self.report.token_bytes = sequence.computed, sequence.kv.token_bytes

    @property
    def decoding(self) -> Policy:
        """The policy that the next token is decoded under."""
        if self.control is None:
            return self.policy
        method = self.control.method
        if method is not self._decoding.decode:
            self._decoding = replace(self.policy, decode=method)
        return self._decoding

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.sequence.tokens[self.output_start :]

    def to_score(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The rows among ``start .. stop - 1`` that predict a prompt token whose log-probability is wanted still, each
        with that token.

        Rows of earlier turns never count, even if they are computed again: what was dropped must not show in a result.
        """
        if self.params.prompt_logprobs is None:
            return ()
        first = self.output_start - len(self.prompt) + self.params.prompt_logprobs_start - 1
        rows = range(max(start, first, self.first_row), min(stop, self.output_start - 1))
        tokens = self.sequence.tokens
        return tuple((row, tokens[row + 1]) for row in rows if row + 1 not in self.prompt_scores)

    @property
    def awaits_mask(self) -> bool:
        """Whether the next token cannot be chosen yet, or that of a sample that waits for this prompt."""
        matchers = (one.sampler.steering.matcher for one in (self, *self.forks))
        return any(matcher is not None and not matcher.ready for matcher in matchers)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def progress(self, prefilled: int) -> StepOutput:
        """An output that says how far the prompt is computed."""
        return StepOutput(
            self.id,
            prefilled=min(prefilled, self.output_start),
            prefill_total=self.output_start,
            cached=self.report.cached_tokens,
            kept=self.report.kept_tokens,
        )
