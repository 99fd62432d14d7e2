"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from saccade.engine.messages import RequestOutcome, StepOutput
from saccade.models.token_texts import TokenTexts
from saccade.server.admission import Caller
from saccade.server.endpoint import JSON, Choices
from saccade.server.errors import bad_request
from saccade.server.generation import Ask, Generation
from saccade.server.grammar import constraint_of, grammar_of
from saccade.server.logprobs import TextLogprobs, prompt_logprobs
from saccade.server.params import sampling_params
from saccade.server.protocol import CompletionRequest
from saccade.server.serving import Serving

DEFAULT_TOKENS = 16  # OpenAI's and vLLM's
MOST_PROMPTS = 1024


class Completion(Choices):
    """One request for texts that go on from prompts."""

    prefix = "cmpl-"
    whole = part = "text_completion"

    def __init__(self, serving: Serving, caller: Caller, body: CompletionRequest) -> None:
        super().__init__(serving, caller, body)
        self.body = body

    async def ask(self) -> Ask:
        body, serving = self.body, self.serving
        policy = await serving.policy(self.caller, body.policy)
        most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        self.scores_alone = most == 0 and bool(body.echo)  # what lm-eval and others ask for: no answer, the prompt
        prompts: list[list[int]] = []
        self.last: dict[int, int] = {}
        for given in self._given():
            tokens = given if isinstance(given, list) else await self._encode(given)
            if body.truncate_prompt_tokens is not None:
                tokens = tokens[-body.truncate_prompt_tokens :]
            # A prompt that fills the context is scored alone up to its last token, which is then the answer.
            fills = self.scores_alone and len(tokens) == serving.about.limits.max_model_len
            serving.check_length(tokens[:-1] if fills else tokens, most if most > 0 else None, "prompt")
            if fills:
                self.last[len(prompts)] = tokens[-1]
            prompts.append(tokens)
        wanted = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            wanted = max(body.logprobs, wanted or 0)
        params = sampling_params(
            body.model_copy(update={"prompt_logprobs": wanted}),
            serving.defaults,
            1 if self.scores_alone else most,
            logprobs=wanted if self.last else body.logprobs,
        )
        constraint = await constraint_of(serving, grammar_of(body))
        self.policy, self.n, self.prompts = policy, params.n, prompts
        self.samples = len(prompts) * params.n
        decode, self.skip = serving.tokenizer.decode, params.skip_special_tokens
        self.echoed = [decode(tokens, skip_special_tokens=self.skip) if body.echo else "" for tokens in prompts]
        self.scores = TextLogprobs(body.logprobs or 0, bool(body.return_tokens_as_token_ids))
        asked = [prompt[:-1] if place in self.last else prompt for place, prompt in enumerate(prompts)]
        deadline, salt = body.deadline_seconds, body.cache_salt
        return Ask(asked, params, policy, body.session_id, constraint, deadline, salt, answers=self.last)

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
        echoed = self.echoed[index // self.n]
        answer = self.scores.chunk(tokens, entries, len(echoed))
        if not self.body.echo:
            return answer
        prompt = self.prompts[index // self.n]
        scored = self._prompt_scores[index // self.n]
        scored = [*[None] * (len(prompt) - len(scored)), *scored]  # what a session holds is scored no more
        whole = self.scores.of(prompt, scored, self._texts[index // self.n])
        return {name: values + answer[name] for name, values in whole.items()}

    def _places(self, prompt: list[int]) -> list[tuple[str, int]]:
        """Each token's text and its place in the prompt's."""
        tokenizer = self.serving.tokenizer
        texts, stream = TokenTexts(tokenizer, self.skip), tokenizer.stream(self.skip)
        taken = [texts.take(token, stream.step(token))[0] for token in prompt]
        return [(one.text, one.offset) for one in taken]

    def _scored(self, place: int, outcome: RequestOutcome) -> list[Any] | None:
        """Log-probabilities of a whole prompt, those of its last token too where that had to be the answer."""
        found = outcome.prompt_logprobs
        return [*found, *(outcome.logprobs or [])] if found is not None and place in self.last else found

    def usage(self, generation: Generation, outcomes: list[RequestOutcome]) -> JSON:
        counted = super().usage(generation, outcomes)
        if self.scores_alone:  # the token that scoring takes is none of the answer's
            prompt = counted["prompt_tokens"] + len(self.last)
            counted |= {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt}
        return counted

    def ending(self, outcome: RequestOutcome, reason: str) -> JSON:
        ended = super().ending(outcome, "length" if self.scores_alone else reason)
        return ended | {"stop_reason": None} if self.scores_alone else ended

    async def answer(self, generation: Generation) -> JSON:
        outcomes, choices = await generation.all(), []
        scored = [self._scored(place, one) for place, one in enumerate(outcomes[:: self.n])]
        self._prompt_scores = [one or [None] * len(prompt) for one, prompt in zip(scored, self.prompts)]
        if self.body.echo and self.body.logprobs is not None:
            off_loop = self.serving.off_loop
            self._texts = [await off_loop(len(one), partial(self._places, one)) for one in self.prompts]
        for index, outcome in enumerate(outcomes):
            text = self.echoed[index // self.n] + ("" if self.scores_alone else outcome.text)
            ending = self.ending(outcome, outcome.finish_reason)
            if self.body.prompt_logprobs is not None:
                ending["prompt_logprobs"] = prompt_logprobs(scored[index // self.n])
            choices.append(self.choice(index, {"text": text}, self._logprobs(index, outcome), ending))
        return self.completed(generation, outcomes, choices)

    def opening(self, generation: Generation) -> Iterable[bytes]:
        for index in range(self.samples if self.body.echo else 0):
            yield self.chunk(generation, index, {"text": self.echoed[index // self.n]})

    def events(self, generation: Generation, index: int, output: StepOutput) -> Iterable[bytes]:
        outcome, scores = output.outcome, None
        if output.new_logprobs:
            scores = self.scores.chunk(output.new_tokens, output.new_logprobs)
        if (output.new_text or scores) and not self.scores_alone:
            yield self.chunk(generation, index, {"text": output.new_text}, scores)
        if outcome is not None:
            yield self.chunk(generation, index, {"text": ""}, None, self.ending(outcome, outcome.finish_reason))
