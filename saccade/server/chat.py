"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from saccade.engine.messages import RequestOutcome, StepOutput
from saccade.server import reasoning
from saccade.server.admission import Caller
from saccade.server.endpoint import JSON, Choices
from saccade.server.errors import ApiError, bad_request, renamed
from saccade.server.generation import Ask, Generation
from saccade.server.grammar import OFF_CODE, Grammar, constraint_of, grammar_of
from saccade.server.logprobs import chat_logprobs, prompt_logprobs
from saccade.server.params import sampling_params
from saccade.server.protocol import ChatRequest
from saccade.server.reader import Delta, Joined, Reader
from saccade.server.serving import Serving
from saccade.server.tool_choice import tool_choice
from saccade.server.tool_formats import FORMATS, UNKNOWN
from saccade.server.tool_formats.harmony import Harmony, HarmonyReader, channel_grammar, next_message
from saccade.server.tool_formats.parts import Arguments, Begun, Part
from saccade.server.usage import costs

_TAIL = 64  # tokens at the end of a prompt that may open or close thoughts


class Chat(Choices):
    """One chat. ``cuts``: an answer that the context has no room for ends early, where others are refused."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, serving: Serving, caller: Caller, body: ChatRequest, cuts: bool = False) -> None:
        super().__init__(serving, caller, body)
        self.body, self.cuts = body, cuts
        self.tools, self.parser = tool_choice(body), FORMATS.get(serving.config.tool_parser or "")
        # How calls are read: as they are forced, where the model's own format is not known.
        self.format = self.parser or (UNKNOWN if self.tools.forced else None)
        self.thinks = reasoning.FORMATS.get(serving.config.reasoning_parser or "")
        self.channels = isinstance(self.parser, Harmony) or self.thinks is reasoning.FORMATS[reasoning.HARMONY]

    async def prompt(self) -> tuple[list[int], JSON]:
        """The conversation as tokens, and the variables that its template was given."""
        body, serving = self.body, self.serving
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        if self.tools.tools:
            self._check_tools()
            variables["tools"] = self.tools.tools
        messages = await serving.conversation(body.messages)
        self.last = str(messages[-1]["content"])
        goes_on, control = bool(body.continue_final_message), body.allow_control_tokens
        generate = body.add_generation_prompt is not False and not goes_on
        prompt = await serving.template(messages, generate, variables, control, goes_on)
        return prompt, variables

    async def ask(self) -> Ask:
        body, serving = self.body, self.serving
        policy = await serving.policy(self.caller, body.policy)
        prompt, variables = await self.prompt()
        if body.truncate_prompt_tokens is not None:
            prompt = prompt[-body.truncate_prompt_tokens :]
        named = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        most: int | None = getattr(body, named)
        serving.check_length(prompt, None if self.cuts else most, "messages")
        self.top = body.top_logprobs or 0
        try:
            params = sampling_params(body, serving.defaults, most, logprobs=self.top if body.logprobs else None)
        except ApiError as error:
            raise renamed(error, {"max_tokens": named}) from error
        constraint = await self._constraint(prompt, variables)
        if serving.words.hidden(self._marks()):
            params = replace(params, skip_special_tokens=False)
        self.policy, self.n, self.samples = policy, params.n, params.n
        self.readers = [self._reader() for _ in range(params.n)]
        self.echoed = self.last if body.echo else ""
        return Ask([prompt], params, policy, body.session_id, constraint, body.deadline_seconds, body.cache_salt)

    def _check_tools(self) -> None:
        template = str(getattr(self.serving.tokenizer.hf, "chat_template", "") or "")
        if "tools" not in template:
            raise bad_request("this model's chat template knows no tools", "tools", "unsupported_field")
        if self.format is None:
            raise bad_request(
                "calls of this model cannot be read: start the server with --tool-parser, or name one in tool_choice",
                "tools",
                "unsupported_field",
            )

    async def _constraint(self, prompt: Sequence[int], variables: Mapping[str, Any]) -> Grammar | None:
        """What the answer must follow: from its beginning on, or behind thoughts that the prompt opens. Sets how
        answers are read."""
        body, serving = self.body, self.serving
        grammar = grammar_of(body)
        if self.tools.forced:
            if grammar is not None:
                raise bad_request("tool_choice and a grammar exclude each other", "tool_choice")
            assert self.format is not None
            grammar = self.tools.grammar(self.format, serving.words)
        # What a response format asks for is no call, whatever it looks like.
        self.calls = bool(self.tools.tools) and (grammar is None or grammar[1] != "response_format")
        self.exact, self.begins = grammar is not None, "answer"
        wrap: Callable[[str], str] | None = None
        format, end = self.thinks, ""
        if self.channels or format is not None:
            end = serving.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        if self.channels:
            thinks = reasoning.FORMATS[reasoning.HARMONY]
            self.begins = reasoning.beginning(thinks, end, variables, self.exact)
            if body.continue_final_message:
                self.begins = "answer"
                wrap = partial(next_message, words=serving.words) if self.tools.forced else None
            elif grammar is not None:
                opened = self.begins == "thoughts"
                wrap = partial(channel_grammar, words=serving.words, opened=opened, calls=self.tools.forced)
        elif format is not None:
            self.begins = reasoning.beginning(format, end, variables, self.exact)
            if body.continue_final_message:  # what it goes on from was begun by the client
                inside = self.last.rfind(format.begin) > self.last.rfind(format.end)
                self.begins = "thoughts" if inside else "answer"
            opened = self.begins == "thoughts"
            if grammar is not None and (opened or (self.begins == "either" and reasoning.switched(variables, True))):
                wrap = partial(format.before, words=serving.words, opened=opened, calls=self.tools.forced)
        try:
            return await constraint_of(serving, grammar, wrap)
        except ApiError as error:
            fault = None
            if self.format is not None and error.code != OFF_CODE:  # which no tool is to blame for
                fault = await self.tools.fault(serving, self.format)
            raise fault or error from error

    def _reader(self) -> Reader:
        single = self.body.parallel_tool_calls is False
        if self.channels:
            opened = "analysis" if self.begins == "thoughts" else None
            opened = "final" if self.body.continue_final_message else opened
            calls = self.calls and self.format is not None
            return Reader(HarmonyReader(opened, calls, self.thinks is not None), single)
        thoughts = None
        if self.thinks is not None and self.begins != "answer":
            thoughts = reasoning.ReasoningReader(self.thinks, self.begins == "thoughts", self.exact)
        if not self.calls or self.format is None:
            return Reader(Joined(thoughts))
        return Reader(Joined(thoughts, self.format.reader(self.tools.tools)), single)

    def _marks(self) -> tuple[str, ...]:
        """Marks that the answer is read by: they must be in its text, even where they are special tokens."""
        calls = self.format.marks if self.calls and self.format is not None else ()
        return (*calls, *(self.thinks.marks if self.thinks is not None else ()))

    def _message(self, delta: Delta) -> JSON:
        message: JSON = {"role": "assistant", "content": self.echoed + delta.content, "refusal": None}
        calls = _calls(delta.parts, -1)
        if calls:
            message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
            message["content"] = message["content"] if message["content"].strip() else None
        return message | self._thoughts(delta.thoughts)

    def _thoughts(self, text: str) -> JSON:
        """Under vLLM's name, and under the one that clients of older servers know."""
        shown = text and self.body.include_reasoning is not False
        return {"reasoning": text, "reasoning_content": text} if shown else {}

    def _reason(self, index: int, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self.readers[index].called else reason

    def head(self, kind: str) -> JSON:
        return {**super().head(kind), "system_fingerprint": None}

    async def answer(self, generation: Generation) -> JSON:
        outcomes, choices = await generation.all(), []
        for index, outcome in enumerate(outcomes):
            delta = self.readers[index].whole(outcome.text)
            scores = None if outcome.logprobs is None else self._scores(outcome.token_ids, outcome.logprobs)
            ending = self.ending(outcome, self._reason(index, outcome.finish_reason))
            choices.append(self.choice(index, {"message": self._message(delta)}, scores, ending))
        scored = prompt_logprobs(outcomes[0].prompt_logprobs)
        return {**self.completed(generation, outcomes, choices), "service_tier": None, "prompt_logprobs": scored}

    def opening(self, generation: Generation) -> Iterable[bytes]:
        for index in range(self.n):
            yield self.chunk(generation, index, {"delta": {"role": "assistant", "content": self.echoed}})

    def events(self, generation: Generation, index: int, output: StepOutput) -> Iterable[bytes]:
        outcome = output.outcome
        delta = self.readers[index].feed(output.new_text, final=outcome is not None)
        scores = self._scores(output.new_tokens, output.new_logprobs) if output.new_logprobs else None
        if delta or scores:
            said: JSON = self._thoughts(delta.thoughts)
            begun = sum(isinstance(part, Begun) for part in delta.parts)
            calls = _calls(delta.parts, self.readers[index].begun - begun - 1)
            if delta.content or not calls:
                said["content"] = delta.content
            if calls:
                said["tool_calls"] = calls
            yield self.chunk(generation, index, {"delta": said}, scores)
        if outcome is not None:
            ending = self.ending(outcome, self._reason(index, outcome.finish_reason))
            yield self.chunk(generation, index, {"delta": {}}, None, ending)

    def costs(self, outcome: RequestOutcome) -> JSON:
        """Of an answer that is told in another form."""
        found = costs([outcome.report], self.policy.text)
        return {**found, "notes": [*found["notes"], *self.notes]}

    def usage(self, generation: Generation, outcomes: list[RequestOutcome]) -> JSON:
        used = super().usage(generation, outcomes)
        used["saccade"]["notes"] += self.notes
        return used

    @property
    def notes(self) -> list[str]:
        """What did not go as asked, of what the model wrote."""
        return list(dict.fromkeys(note for reader in self.readers for note in reader.notes))

    def _scores(self, tokens: list[int], entries: list[Any]) -> JSON:
        return chat_logprobs(tokens, entries, self.top, bool(self.body.return_tokens_as_token_ids))


def _calls(parts: Iterable[Part], index: int) -> list[JSON]:
    """What is new of calls, one entry each. ``index``: of the call that is under way."""
    calls: list[JSON] = []
    for part in parts:
        if isinstance(part, Begun):
            index += 1
            function = {"name": part.name, "arguments": ""}
            calls.append({"index": index, "id": part.id, "type": "function", "function": function})
        elif isinstance(part, Arguments):
            if not calls:
                calls.append({"index": index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += part.text
    return calls
