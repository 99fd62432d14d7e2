"""``POST /v1/messages``: Anthropic's Messages API, on what answers chats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from saccade.engine.messages import RequestOutcome, StepOutput
from saccade.server.admission import Caller
from saccade.server.anthropic_blocks import chat_choice, chat_messages, chat_tools, renamed_tool, texts
from saccade.server.anthropic_protocol import MessagesRequest, Prompt
from saccade.server.anthropic_system import NOTE, behind
from saccade.server.anthropic_writer import BlockWriter
from saccade.server.chat import Chat
from saccade.server.endpoint import JSON, Endpoint
from saccade.server.errors import ApiError, from_validation, renamed
from saccade.server.generation import Ask, Generation
from saccade.server.protocol import ChatRequest, Sampling
from saccade.server.serving import Serving
from saccade.server.usage import thought_tokens

_OWN = {"n", "request_id", "stream", "stream_options", "response_format", "max_tokens"}  # not handed on as they are
# What the fields of a chat are called here.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
}


class Messages(Endpoint):
    """One request for a message."""

    prefix, ping, done = "msg_", BlockWriter.event("ping"), b""

    def __init__(self, serving: Serving, caller: Caller, body: Prompt) -> None:
        super().__init__(serving, caller, body)
        self.body, self.moved = body, False
        hidden = body.thinking is not None and body.thinking.display == "omitted"
        self.writer = BlockWriter(not hidden)
        self.chat = self._chat()

    def _chat(self) -> Chat:
        """The same request as a chat. ApiError for a field that is wrong."""
        body = self.body
        fields: JSON = {
            name: value
            for name in Sampling.model_fields
            if name not in _OWN and (value := getattr(body, name)) is not None
        }
        fields["messages"] = messages = self._conversation()
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1] and messages[-1]["content"]:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        fields["tools"] = chat_tools(body.tools or [])
        fields["tool_choice"] = chat_choice(body.tool_choice)
        if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        if isinstance(body, MessagesRequest):
            fields["max_completion_tokens"] = body.max_tokens
            fields["stop"] = body.stop_sequences
        variables = dict(body.chat_template_kwargs or {})
        if body.thinking is not None:
            on = body.thinking.type != "disabled"
            variables = {"enable_thinking": on, "thinking": on, **variables}
        fields["chat_template_kwargs"] = variables or None
        wanted = body.output_config
        if wanted is not None:
            fields["reasoning_effort"] = wanted.effort
            if wanted.format is not None:
                schema = {"name": "answer", "schema": wanted.format.schema_}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        try:
            return Chat(self.serving, self.caller, ChatRequest.model_validate(fields), cuts=True)
        except ValidationError as error:
            raise renamed(from_validation(error.errors()), _NAMES) from error
        except ApiError as error:
            raise renamed_tool(error) from error

    def _conversation(self) -> list[JSON]:
        body = self.body
        messages, system = chat_messages(body.messages), body.system
        if isinstance(system, list):
            blocks = texts(system, "system", "system")
            self.moved = self.serving.heads.changes(self.caller.name, system, blocks, body.messages)
            if self.moved:
                head, *blocks = blocks
                behind(messages, head)
            system = "\n".join(blocks)
        return [{"role": "system", "content": system}, *messages] if system else messages

    async def ask(self) -> Ask:
        self.chat.body.session_id = self.body.session_id  # a header may have named it since
        try:
            return await self.chat.ask()
        except ApiError as error:
            raise renamed_tool(renamed(error, _NAMES)) from error

    async def count(self) -> JSON:
        """How many tokens the prompt has."""
        try:
            tokens, _ = await self.chat.prompt()
        except ApiError as error:
            raise renamed_tool(renamed(error, _NAMES)) from error
        return {"input_tokens": len(tokens)}

    def _usage(self, generation: Generation, outcome: RequestOutcome | None = None) -> JSON:
        """Of the prompt what was read from the cache, what was added to it, and the rest."""
        cached = generation.cached if outcome is None else outcome.report["cached_tokens"]
        prompt, kept = generation.prompt_tokens, generation.kept
        created = max(0, (prompt if self.chat.body.session_id is not None else kept) - cached)
        used: JSON = {
            "input_tokens": prompt - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.tokens,
        }
        if outcome is not None:
            thought = thought_tokens(self.serving.tokenizer, self.writer.thoughts, generation.tokens)
            used["output_tokens_details"] = {"thinking_tokens": thought}
            used["saccade"] = self.chat.costs(outcome)
            if self.moved:
                used["saccade"]["notes"].append(NOTE)
        return used

    def _message(self, content: list[JSON], ending: JSON, usage: JSON) -> JSON:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": usage,
        }

    def _ending(self, generation: Generation, outcome: RequestOutcome) -> JSON:
        """Why the answer ended."""
        reason, sequence = "end_turn", None
        if outcome.finish_reason == "length":
            assert isinstance(self.body, MessagesRequest)
            full = generation.tokens < self.body.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif self.chat.readers[0].called:
            reason = "tool_use"
        elif isinstance(outcome.stop_reason, str):
            reason, sequence = "stop_sequence", outcome.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    async def answer(self, generation: Generation) -> JSON:
        [outcome] = await generation.all()
        self.writer.feed(self.chat.readers[0].whole(outcome.text))
        self.writer.end()
        ending = self._ending(generation, outcome)
        message = self._message(self.writer.content, ending, self._usage(generation, outcome))
        return message | {"report": outcome.report} if self.body.report else message

    def opening(self, generation: Generation) -> Iterable[bytes]:
        begun = self._message([], {"stop_reason": None, "stop_sequence": None}, self._usage(generation))
        yield self.writer.event("message_start", message=begun)
        yield self.ping

    def events(self, generation: Generation, index: int, output: StepOutput) -> Iterable[bytes]:
        outcome = output.outcome
        yield from self.writer.feed(self.chat.readers[0].feed(output.new_text, final=outcome is not None))
        if outcome is not None:
            yield from self.writer.end()

    def closing(self, generation: Generation) -> Iterable[bytes]:
        outcome = generation.outcomes[0]
        report: dict[str, Any] = {"report": outcome.report} if self.body.report else {}
        ending, usage = self._ending(generation, outcome), self._usage(generation, outcome)
        yield self.writer.event("message_delta", delta=ending, usage=usage, **report)
        yield self.writer.event("message_stop")

    def failure(self, error: ApiError) -> Iterable[bytes]:
        yield self.writer.event("error", error=error.for_path("/v1/messages")[1]["error"])
