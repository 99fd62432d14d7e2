"""From a step's logits to a request's answer: tokens, text, log-probabilities, and when it ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from saccade.engine.messages import RequestOutcome, StepOutput, TokenLogprob
from saccade.engine.request import Request
from saccade.engine.sampling.sampler import top_logprobs
from saccade.engine.steps.step import LogprobEntries, RequestResult
from saccade.engine.watch.contradiction import Warnings
from saccade.errors import failure
from saccade.models.token_texts import TokenTexts

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel

logger = logging.getLogger(__name__)

# Instruct models end what looks like a whole text at once.
UNASKED = (
    "the model ended its answer at once: it has a chat template, and this prompt went in without it; ask through the "
    "template (LLM.chat, /v1/chat/completions, saccade generate without --raw)"
)


class Answers:
    """Turns results into the answers of a model's requests."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._warnings = Warnings()

    def take_token(self, request: Request, result: RequestResult, output: StepOutput) -> str | None:
        """Choose the next token, add it to the sequence, and to ``output`` what of the text may be shown. Returns why
        the request ends with it, or fails in choosing it, or None."""
        try:
            return self._take_token(request, result, output)
        except Exception as error:  # as in attention: one request's failure must not take the others down
            logger.debug("choosing a token failed", exc_info=True)
            request.error, request.error_type = failure(error, "choosing a token")
            return "error"

    def _take_token(self, request: Request, result: RequestResult, output: StepOutput) -> str | None:
        params, sequence = request.params, request.sequence
        if result.tokens is not None:
            token = result.tokens[-1]
            entries = None if result.logprobs is None else result.logprobs[-1]
        else:
            assert result.logits is not None
            logits = result.logits[-1]
            place = len(sequence.tokens)
            proposal = None if request.speculation is None else request.speculation.proposals.get(place)
            token = request.sampler.sample(sequence.tokens, logits, place, proposal)
            entries = None if params.logprobs is None else top_logprobs(logits, token, params.logprobs)
        sequence.extend([token], "decode", request.decoding)
        if len(sequence.tokens) == self.model.runner.restart_length:
            sequence.restart(request.policy)
            request.report.note(f"rotary factors change at {len(sequence.tokens)} tokens: all keys were computed again")
        output.new_tokens.append(token)
        request.report.token()
        made = len(sequence.tokens) - request.output_start
        ended = not params.ignore_eos and token in self.model.eos_token_ids
        reason, steering = "stop" if ended or token in params.stop_token_ids else None, request.sampler.steering
        if reason is not None and not steering.ends(request.output_ids, ended):
            reason, ended = None, False
        if reason is not None and not ended:
            request.stop_reason = token
        stopper = request.stopper
        # A special token that ends the answer is no part of its text, even where such tokens are shown.
        # Nor is any under a constraint, which the text follows without it.
        no_text = token in self.model.tokenizer.special_ids or (ended and steering.matcher is not None)
        hidden = reason is not None and not stopper.keep and no_text
        piece = "" if hidden else request.detokenizer.step(token)
        if params.logprobs is not None:
            assert entries is not None
            output.new_logprobs.append(self._record_logprobs(request, entries, token, piece, hidden))
        if stopper.add(piece, counts=made > params.min_tokens):
            reason, request.stop_reason = "stop", stopper.met
        elif reason is None and made >= request.max_tokens:
            reason = "length"
        if reason is not None and not stopper.stopped:
            stopper.add(request.detokenizer.flush())
        output.new_text += stopper.release(final=reason is not None)
        if reason is None and steering.matcher is not None:
            steering.matcher.ahead(request.output_ids)
        return reason

    def end(self, request: Request, reason: str) -> None:
        """Write down the answer of a request that ends."""
        request.finish_reason = reason
        request.text = request.stopper.text
        request.final_ids = list(request.output_ids)
        request.report.finish(len(request.final_ids))
        if reason == "stop" and self._unasked(request):
            request.report.note(UNASKED)
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = self._prompt_logprobs(request)

    def _unasked(self, request: Request) -> bool:
        """Whether the model's own end came first, for a prompt that does not end as its chat template has it."""
        if request.text or request.stop_reason is not None or len(request.final_ids) > 1:
            return False
        end = self.model.tokenizer.template_end
        return bool(end) and tuple(request.prompt[-len(end) :]) != end

    def outcome(self, request: Request) -> RequestOutcome:
        """How a request ended, as plain data."""
        assert request.finish_reason is not None
        wanted = request.params.logprobs is not None
        if (found := request.report.contradicted()) is not None:
            self._warnings.tell(found, request.policy)
        return RequestOutcome(
            request.prompt,
            request.text,
            request.final_ids,
            request.finish_reason,
            request.report.as_dict(),
            request.error,
            request.cumulative_logprob if wanted else None,
            request.logprobs if wanted else None,
            request.prompt_logprobs,
            request_id=request.id,
            stop_reason=request.stop_reason,
            metrics=request.report.metrics(),
            selection_map=None if request.maps is None else request.maps.as_dict(),
            error_type=request.error_type,
        )

    def _record_logprobs(
        self, request: Request, entries: LogprobEntries, token: int, piece: str, hidden: bool
    ) -> dict[int, TokenLogprob]:
        if request.token_texts is None:
            request.token_texts = TokenTexts(self.model.tokenizer, request.params.skip_special_tokens)
        request.cumulative_logprob += entries[token][0]
        request.logprobs.append(_named(request.token_texts, entries, token, piece, hidden))
        return request.logprobs[-1]

    def _prompt_logprobs(self, request: Request) -> list[dict[int, TokenLogprob] | None]:
        """One entry a token of the prompt, None for those that nothing predicts."""
        skip, found = request.params.skip_special_tokens, []
        texts, stream = TokenTexts(self.model.tokenizer, skip), self.model.tokenizer.stream(skip)
        for place, token in enumerate(request.prompt, request.output_start - len(request.prompt)):
            entries = request.prompt_scores.get(place)
            named = _named(texts, {} if entries is None else entries, token, stream.step(token))
            found.append(None if entries is None else named)
        return found


def _named(
    texts: TokenTexts, entries: LogprobEntries, token: int, piece: str, hidden: bool = False
) -> dict[int, TokenLogprob]:
    """``entries`` of the next ``token`` with the tokens' texts."""
    mine, others = texts.take(token, piece, entries, hidden)
    return {
        other: TokenLogprob(logprob, rank, *(mine if other == token else others[other]))
        for other, (logprob, rank) in entries.items()
    }
