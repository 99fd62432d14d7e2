"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from saccade.engine.messages import RequestOutcome, StepOutput
from saccade.server.admission import Caller
from saccade.server.errors import ApiError, bad_request
from saccade.server.events import DONE, error_event, event
from saccade.server.generation import Ask, Generation, Piece
from saccade.server.grammar import constraint_of, grammar_of
from saccade.server.logprobs import TextLogprobs, prompt_logprobs
from saccade.server.params import refuse_unsupported, sampling_params
from saccade.server.protocol import CompletionRequest
from saccade.server.serving import Serving
from saccade.server.usage import counts, usage

JSON = dict[str, Any]

DEFAULT_TOKENS = 16  # OpenAI's and vLLM's
MOST_PROMPTS = 1024


class Completion:
    """One request. :meth:`ask` checks it; then :meth:`answer`, or :meth:`stream`, tells what a generation gives."""

    def __init__(self, serving: Serving, caller: Caller, body: CompletionRequest) -> None:
        self.serving, self.caller, self.body = serving, caller, body
        self.id = f"cmpl-{body.request_id or uuid4().hex}"
        self.model = serving.model(body.model)
        self.created = int(time.time())
        refuse_unsupported(body)

    async def ask(self) -> Ask:
        """What the engine is to do. ApiError for a request that it cannot serve as asked."""
        body, serving = self.body, self.serving
        policy = serving.policy(self.caller, body.policy)
        most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        self.scores_alone = most == 0 and bool(body.echo)  # what lm-eval and others ask for: no answer, the prompt
        prompts = []
        for given in self._given():
            tokens = given if isinstance(given, list) else await self._encode(given)
            if body.truncate_prompt_tokens is not None:
                tokens = tokens[-body.truncate_prompt_tokens :]
            serving.check_length(tokens, most if most > 0 else None, "prompt")
            prompts.append(tokens)
        wanted = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            wanted = max(body.logprobs, wanted or 0)
        params = sampling_params(
            body.model_copy(update={"prompt_logprobs": wanted}),
            serving.defaults,
            1 if self.scores_alone else most,
            logprobs=body.logprobs,
        )
        constraint = await constraint_of(serving, grammar_of(body))
        self.policy, self.n, self.prompts = policy, params.n, prompts
        decode = serving.llm.tokenizer.decode
        self.echoed = [decode(tokens) if body.echo else "" for tokens in prompts]
        self.scores = [
            TextLogprobs(body.logprobs or 0, bool(body.return_tokens_as_token_ids), 0 if body.echo else len(echoed))
            for echoed in self.echoed
            for _ in range(self.n)
        ]
        return Ask(prompts, params, policy, body.session_id, constraint, body.deadline_seconds, body.cache_salt)

    def _given(self) -> list[str | list[int]]:
        """The prompts one by one."""
        prompt: Any = self.body.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt or len(prompt) > MOST_PROMPTS:
            raise bad_request(f"prompt must be text, tokens or a list of 1 to {MOST_PROMPTS} of those", "prompt")
        return list(prompt)

    async def _encode(self, text: str) -> list[int]:
        if not text:
            raise bad_request("the prompt is empty; give at least one token", "prompt")
        return await self.serving.encode(text, self.body.add_special_tokens is not False)

    def _logprobs(self, index: int, outcome: RequestOutcome) -> JSON | None:
        """Of a whole choice, with its prompt where that is echoed."""
        if self.body.logprobs is None:
            return None
        tokens, entries = list(outcome.token_ids), list(outcome.logprobs or [])
        if self.scores_alone:
            tokens, entries = [], []
        if not self.body.echo:
            return self.scores[index].chunk(tokens, entries, [""] * len(tokens))
        prompt = self.prompts[index // self.n]
        scored = self._prompt_scores[index // self.n]
        decode = self.serving.llm.tokenizer.decode
        texts = [decode([token], skip_special_tokens=False) for token in prompt]
        return self.scores[index].chunk([*prompt, *tokens], [*scored, *entries], [*texts, *([""] * len(tokens))])

    async def answer(self, generation: Generation) -> JSON:
        """The whole answer."""
        outcomes = await generation.all()
        self._prompt_scores = [
            one.prompt_logprobs or [None] * len(prompt) for one, prompt in zip(outcomes[:: self.n], self.prompts)
        ]
        choices = []
        for index, outcome in enumerate(outcomes):
            choice = {
                "index": index,
                "text": self.echoed[index // self.n] + ("" if self.scores_alone else outcome.text),
                "logprobs": self._logprobs(index, outcome),
                "finish_reason": "length" if self.scores_alone else outcome.finish_reason,
                "stop_reason": None if self.scores_alone else outcome.stop_reason,
            }
            if self.body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(outcomes[index - index % self.n].prompt_logprobs)
            if self.body.report:
                choice["report"] = outcome.report
            choices.append(choice)
        answer = 0 if self.scores_alone else generation.tokens
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage(outcomes, generation.prompt_tokens, answer, self.n, self.policy.text),
            "system_fingerprint": None,
        }

    async def stream(self, generation: Generation, first: list[Piece]) -> AsyncGenerator[bytes, None]:
        """The answer as events. What goes wrong from here on is an event too. ``generation`` is closed at the end."""
        options = self.body.stream_options
        continuous = options is not None and bool(options.continuous_usage_stats)
        samples = len(self.prompts) * self.n
        try:
            for index in range(samples if self.body.echo else 0):
                yield self._chunk(generation, index, self.echoed[index // self.n], continuous)
            pieces = first
            while pieces or not generation.finished:
                for index, output in pieces or await generation.take():
                    for chunk in self._chunks(generation, index, output, continuous):
                        yield chunk
                pieces = []
            if options is not None and options.include_usage:
                outcomes = [generation.outcomes[index] for index in range(samples)]
                total = usage(outcomes, generation.prompt_tokens, generation.tokens, self.n, self.policy.text)
                yield event({**self._head(), "choices": [], "usage": total})
        except ApiError as error:
            yield error_event(error)
        finally:
            generation.close()
        yield DONE

    def _chunks(self, generation: Generation, index: int, output: StepOutput, continuous: bool) -> list[bytes]:
        outcome, chunks = output.outcome, []
        scores = None
        if output.new_logprobs:
            scores = self.scores[index].chunk(output.new_tokens, output.new_logprobs, [""] * len(output.new_tokens))
        if (output.new_text or scores) and not self.scores_alone:
            chunks.append(self._chunk(generation, index, output.new_text, continuous, scores))
        if outcome is not None:
            ending: JSON = {
                "finish_reason": "length" if self.scores_alone else outcome.finish_reason,
                "stop_reason": outcome.stop_reason,
            }
            if self.body.report:
                ending["report"] = outcome.report
            chunks.append(self._chunk(generation, index, "", continuous, None, ending))
        return chunks

    def _head(self) -> JSON:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _chunk(
        self,
        generation: Generation,
        index: int,
        text: str,
        continuous: bool,
        scores: JSON | None = None,
        ending: JSON | None = None,
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": scores, "finish_reason": None, **(ending or {})}
        chunk = {**self._head(), "choices": [choice]}
        if continuous:
            chunk["usage"] = counts(generation.prompt_tokens, generation.tokens)
        return event(chunk)
