"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from saccade.engine.messages import StepOutput
from saccade.server import reasoning, tools
from saccade.server.admission import Caller
from saccade.server.errors import ApiError, bad_request
from saccade.server.events import DONE, error_event, event
from saccade.server.generation import Ask, Generation, Piece
from saccade.server.grammar import constraint_of, grammar_of, json_grammar
from saccade.server.logprobs import chat_logprobs, prompt_logprobs
from saccade.server.messages import conversation
from saccade.server.params import refuse_unsupported, sampling_params
from saccade.server.protocol import ChatRequest
from saccade.server.serving import Serving
from saccade.server.usage import counts, usage

JSON = dict[str, Any]


@dataclass
class Delta:
    """What is new of a message."""

    content: str = ""
    thoughts: str = ""
    calls: list[tools.Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thoughts or self.calls)


class Reader:
    """Reads one choice's text: thoughts, then text and calls of tools, the first of them alone where ``single``."""

    def __init__(self, thoughts: reasoning.ReasoningReader | None, calls: Any = None, single: bool = False) -> None:
        self._thoughts, self._calls, self._single = thoughts, calls, single
        self.called = 0  # calls so far

    def feed(self, text: str, final: bool) -> Delta:
        thoughts, calls = "", []
        if self._thoughts is not None:
            thoughts, text = self._thoughts.feed(text, final)
        if self._calls is not None:
            text, calls = self._calls.feed(text, final)
        if self._single:
            calls = calls[: 1 - self.called]
        self.called += len(calls)
        return Delta(text, thoughts, calls)


class Chat:
    """One request. :meth:`ask` checks it; then :meth:`answer`, or :meth:`stream`, tells what a generation gives."""

    def __init__(self, serving: Serving, caller: Caller, body: ChatRequest) -> None:
        self.serving, self.caller, self.body = serving, caller, body
        self.id = f"chatcmpl-{body.request_id or uuid4().hex}"
        self.model = serving.model(body.model)
        self.created = int(time.time())
        refuse_unsupported(body)
        self.choice = tools.tool_choice(body)

    async def ask(self) -> Ask:
        """What the engine is to do. ApiError for a request that it cannot serve as asked."""
        body, serving = self.body, self.serving
        policy = serving.policy(self.caller, body.policy)
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        if self.choice.tools:
            self._check_tools()
            variables["tools"] = self.choice.tools
        messages = conversation(body.messages)
        prompt = await serving.template(messages, body.add_generation_prompt is not False, variables)
        if body.truncate_prompt_tokens is not None:
            prompt = prompt[-body.truncate_prompt_tokens :]
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        serving.check_length(prompt, most, "messages")
        self.top = body.top_logprobs or 0
        params = sampling_params(body, serving.defaults, most, logprobs=self.top if body.logprobs else None)
        grammar = grammar_of(body)
        if self.choice.forced:
            if grammar is not None:
                raise bad_request("tool_choice and a grammar exclude each other", "tool_choice")
            grammar = json_grammar(self.choice.schema), "tools"
        constraint = await constraint_of(serving, grammar)
        self.policy, self.n = policy, params.n
        self.readers = [self._reader() for _ in range(params.n)]
        self.echoed = str(messages[-1]["content"]) if body.echo else ""
        return Ask([prompt], params, policy, body.session_id, constraint, body.deadline_seconds, body.cache_salt)

    def _check_tools(self) -> None:
        template = str(getattr(self.serving.llm.get_tokenizer(), "chat_template", "") or "")
        if "tools" not in template:
            raise bad_request("this model's chat template knows no tools", "tools", "unsupported_field")
        if not self.choice.forced and self.serving.config.tool_parser is None:
            raise bad_request(
                "calls of this model cannot be read: start the server with --tool-parser, or name one in tool_choice",
                "tools",
                "unsupported_field",
            )

    def _reader(self) -> Reader:
        config, choice = self.serving.config, self.choice
        single = self.body.parallel_tool_calls is False
        if choice.forced:
            return Reader(None, tools.ForcedReader(choice.name), single)
        thoughts = None
        if config.reasoning_parser is not None:
            thoughts = reasoning.ReasoningReader(reasoning.FORMATS[config.reasoning_parser])
        if not choice.tools or config.tool_parser is None:
            return Reader(thoughts)
        return Reader(thoughts, tools.ToolReader(tools.FORMATS[config.tool_parser], choice.tools), single)

    def _message(self, delta: Delta) -> JSON:
        message: JSON = {"role": "assistant", "content": self.echoed + delta.content, "refusal": None}
        if delta.calls:
            message["tool_calls"] = [call.as_dict() for call in delta.calls]
            message["content"] = message["content"] if message["content"].strip() else None
        return message | self._thoughts(delta.thoughts)

    def _thoughts(self, text: str) -> JSON:
        """Under vLLM's name, and under the one that clients of older servers know."""
        shown = text and self.body.include_reasoning is not False
        return {"reasoning": text, "reasoning_content": text} if shown else {}

    def _reason(self, index: int, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self.readers[index].called else reason

    async def answer(self, generation: Generation) -> JSON:
        """The whole answer."""
        outcomes = await generation.all()
        as_ids, choices = bool(self.body.return_tokens_as_token_ids), []
        for index, outcome in enumerate(outcomes):
            delta = self.readers[index].feed(outcome.text, final=True)
            choice = {
                "index": index,
                "message": self._message(delta),
                "logprobs": None
                if outcome.logprobs is None
                else chat_logprobs(outcome.token_ids, outcome.logprobs, self.top, as_ids),
                "finish_reason": self._reason(index, outcome.finish_reason),
                "stop_reason": outcome.stop_reason,
            }
            if self.body.report:
                choice["report"] = outcome.report
            choices.append(choice)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage(outcomes, generation.prompt_tokens, generation.tokens, self.n, self.policy.text),
            "service_tier": None,
            "system_fingerprint": None,
            "prompt_logprobs": prompt_logprobs(outcomes[0].prompt_logprobs),
        }

    async def stream(self, generation: Generation, first: list[Piece]) -> AsyncGenerator[bytes, None]:
        """The answer as events. What goes wrong from here on is an event too. ``generation`` is closed at the end."""
        options = self.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        try:
            for index in range(self.n):
                yield self._chunk(generation, index, {"role": "assistant", "content": self.echoed}, continuous)
            pieces = first
            while pieces or not generation.finished:
                for index, output in pieces or await generation.take():
                    for chunk in self._chunks(generation, index, output, continuous):
                        yield chunk
                pieces = []
            if wants_usage:
                outcomes = [generation.outcomes[index] for index in range(self.n)]
                total = usage(outcomes, generation.prompt_tokens, generation.tokens, self.n, self.policy.text)
                yield event({**self._head(), "choices": [], "usage": total})
        except ApiError as error:
            yield error_event(error)
        finally:
            generation.close()
        yield DONE

    def _chunks(self, generation: Generation, index: int, output: StepOutput, continuous: bool) -> list[bytes]:
        """What one piece of one choice is told by."""
        outcome, chunks = output.outcome, []
        delta = self.readers[index].feed(output.new_text, final=outcome is not None)
        scores = None
        if output.new_logprobs:
            as_ids = bool(self.body.return_tokens_as_token_ids)
            scores = chat_logprobs(output.new_tokens, output.new_logprobs, self.top, as_ids)
        if delta or scores:
            said: JSON = self._thoughts(delta.thoughts)
            if delta.content or not delta.calls:
                said["content"] = delta.content
            if delta.calls:
                before = self.readers[index].called - len(delta.calls)
                said["tool_calls"] = [
                    {"index": before + number, **call.as_dict()} for number, call in enumerate(delta.calls)
                ]
            chunks.append(self._chunk(generation, index, said, continuous, scores))
        if outcome is not None:
            ending: JSON = {
                "finish_reason": self._reason(index, outcome.finish_reason),
                "stop_reason": outcome.stop_reason,
            }
            if self.body.report:
                ending["report"] = outcome.report
            chunks.append(self._chunk(generation, index, {}, continuous, None, ending))
        return chunks

    def _head(self) -> JSON:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def _chunk(
        self,
        generation: Generation,
        index: int,
        delta: JSON,
        continuous: bool,
        scores: JSON | None = None,
        ending: JSON | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": None, **(ending or {})}
        chunk = {**self._head(), "choices": [choice]}
        if continuous:
            chunk["usage"] = counts(generation.prompt_tokens, generation.tokens)
        return event(chunk)
