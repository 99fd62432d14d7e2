"""``POST /v1/responses``: Open Responses, on what answers chats."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError

from saccade.engine.messages import RequestOutcome, StepOutput
from saccade.server.admission import Caller
from saccade.server.chat import Chat
from saccade.server.endpoint import JSON, Endpoint
from saccade.server.errors import ApiError, from_validation, renamed
from saccade.server.events import named_event
from saccade.server.generation import Ask, Generation
from saccade.server.logprobs import chat_logprobs
from saccade.server.protocol import ChatRequest, Sampling
from saccade.server.responses_items import chat_choice, chat_tools, check_calls, kept_items, messages_of
from saccade.server.responses_protocol import ResponsesRequest
from saccade.server.responses_writer import Writer
from saccade.server.serving import Serving
from saccade.server.usage import thought_tokens

_OWN = {"n", "request_id", "stream", "stream_options", "response_format", "max_tokens"}  # not handed on as they are

# What the fields of a chat are called here.
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}


class Responses(Endpoint):
    """One request for a response. ``before``: the conversation that it goes on from, where that is not a stored one's.
    ``frame``: how its events are sent. ``said``: the conversation with its answer, once that is complete."""

    prefix = "resp_"

    def __init__(
        self,
        serving: Serving,
        caller: Caller,
        body: ResponsesRequest,
        before: list[JSON] | None = None,
        frame: Callable[[str, JSON], bytes] = named_event,
    ) -> None:
        super().__init__(serving, caller, body)
        self.body, self.writer = body, Writer(frame, body.include_reasoning is not False)
        earlier = body.previous_response_id
        if before is None:
            before = [] if earlier is None else serving.responses.get(caller, earlier, "previous_response_id").messages
        self.messages = [*before, *messages_of(body.input)]
        check_calls(self.messages)
        self.said: list[JSON] = []
        self.chat = Chat(serving, caller, self._chat_body())

    def _chat_body(self) -> ChatRequest:
        """The same request as a chat. ApiError for a field that is wrong."""
        body = self.body
        same = {name: value for name in Sampling.model_fields if (value := getattr(body, name)) is not None}
        fields: JSON = {name: value for name, value in same.items() if name not in _OWN}
        instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        fields["messages"] = [*instructions, *self.messages]
        fields["max_completion_tokens"] = body.max_output_tokens
        fields["tools"] = chat_tools(body.tools or [])
        fields["tool_choice"] = chat_choice(body.tool_choice)
        fields["parallel_tool_calls"] = body.parallel_tool_calls
        fields["chat_template_kwargs"] = body.chat_template_kwargs
        fields["reasoning_effort"] = None if body.reasoning is None else body.reasoning.effort
        fields["verbosity"] = None if body.text is None else body.text.verbosity
        format = None if body.text is None else body.text.format
        if format is not None and format.type != "text":
            schema = {"name": format.name, "schema": format.schema_, "strict": format.strict}
            kind = format.type
            fields["response_format"] = {"type": kind, **({"json_schema": schema} if kind == "json_schema" else {})}
        self.scored = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
        if self.scored:
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise renamed(from_validation(error.errors()), _NAMES) from error

    async def ask(self) -> Ask:
        self.chat.body.session_id = self.body.session_id  # a header may have named it since
        try:
            ask = await self.chat.ask()
        except ApiError as error:
            raise renamed(error, _NAMES) from error
        self.params = ask.params
        return ask

    def _response(self, status: str, output: list[JSON], usage: JSON | None = None) -> JSON:
        """The resource, as far as it is known."""
        body, params = self.body, self.params
        format = body.text.format if body.text is not None else None
        named = None if format is None else format.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "previous_response_id": body.previous_response_id,
            "instructions": body.instructions,
            "output": output,
            "error": None,
            "tools": [_tool(tool) for tool in body.tools or []],
            "tool_choice": body.tool_choice or "auto",
            "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": named or {"type": "text"}, "verbosity": "medium"},
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "temperature": params.temperature,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "usage": usage,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "store": body.store is not False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "user": body.user,
        }

    def _finished(self, generation: Generation) -> JSON:
        """The resource of an answer that has ended, which is kept if it is to be."""
        outcome, writer = generation.outcomes[0], self.writer
        status = "incomplete" if outcome.finish_reason == "length" else "completed"
        response = self._response(status, writer.output, self._usage(generation, outcome, writer.thoughts))
        if self.body.report:
            response["report"] = outcome.report
        self.said = [*self.messages, *messages_of(writer.output)]
        if self.body.store is not False:
            self.serving.responses.put(self.caller, response, kept_items(self.body.input), self.said)
        return response

    def _usage(self, generation: Generation, outcome: RequestOutcome, thoughts: str) -> JSON:
        prompt, answer = generation.prompt_tokens, generation.tokens
        thought = thought_tokens(self.serving.tokenizer, thoughts, answer)
        cached = outcome.report["cached_tokens"]
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + answer,
            "saccade": self.chat.costs(outcome),
        }

    async def answer(self, generation: Generation) -> JSON:
        [outcome] = await generation.all()
        scores = self._scores(outcome.token_ids, outcome.logprobs or [])
        self.writer.feed(self.chat.readers[0].whole(outcome.text), scores)
        self.writer.end("incomplete" if outcome.finish_reason == "length" else "completed")
        return self._finished(generation)

    def opening(self, generation: Generation) -> Iterable[bytes]:
        begun = self._response("in_progress", [])
        yield self.writer.event("response.created", response=begun)
        yield self.writer.event("response.in_progress", response=begun)

    def events(self, generation: Generation, index: int, output: StepOutput) -> Iterable[bytes]:
        outcome, writer = output.outcome, self.writer
        delta = self.chat.readers[0].feed(output.new_text, final=outcome is not None)
        yield from writer.feed(delta, self._scores(output.new_tokens, output.new_logprobs))
        if outcome is not None:
            yield from writer.end("incomplete" if outcome.finish_reason == "length" else "completed")

    def closing(self, generation: Generation) -> Iterable[bytes]:
        response = self._finished(generation)
        yield self.writer.event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> Iterable[bytes]:
        failed = self._response("failed", self.writer.output)
        failed["error"] = {"code": "server_error", "message": error.message}
        # Open Responses has what went wrong in `error`, OpenAI's client beside it.
        told = {"code": error.code, "message": error.message, "param": error.param}
        yield self.writer.event("error", **told, error=error.body()["error"])
        yield self.writer.event("response.failed", response=failed)

    def _scores(self, tokens: list[int], entries: list[Any]) -> list[JSON]:
        as_ids = bool(self.body.return_tokens_as_token_ids)
        scored: list[JSON] = chat_logprobs(tokens, entries, self.body.top_logprobs or 0, as_ids)["content"]
        return scored if self.scored else []


def _tool(tool: JSON) -> JSON:
    """As the resource shows it, with what was left out."""
    return {"description": None, "parameters": None, "strict": None, **tool}
