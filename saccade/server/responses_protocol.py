"""What ``POST /v1/responses`` may hold (Open Responses, and OpenAI's API that it comes from)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from saccade.server.protocol import JSON, Body, Objects, Sampling, Texts


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JSON | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Text(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


_REFUSED = {
    "background": "the caller waits for the answer; set stream=true to see it come",
    "max_tool_calls": "the client runs the tools and may stop when it likes",
    "conversation": "give previous_response_id instead",
    "prompt": "no prompts are kept here; give input",
    "context_management": "POST /v1/responses/compact shortens a conversation",
}


class ResponsesRequest(Sampling):
    """``input``: text, or items: messages, function calls and their outputs. ``previous_response_id``: a stored
    response, whose conversation this one goes on from; its instructions are not carried over."""

    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: Objects | None = None
    tool_choice: str | JSON | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=100)
    include: Texts | None = None
    chat_template_kwargs: JSON | None = None
    include_reasoning: bool | None = None
    # Honoured at one value alone.
    truncation: str | None = None
    background: bool | None = None
    max_tool_calls: int | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None

    def refused(self) -> tuple[str, str] | None:
        if self.truncation not in (None, "disabled"):
            return "truncation", "nothing is dropped from a conversation"
        for name, why in _REFUSED.items():
            if getattr(self, name):
                return name, why
        for one in self.include or ():
            if one not in ("message.output_text.logprobs", "reasoning.encrypted_content"):
                return "include", "there is no such thing in answers of this server"
        if self.n not in (None, 1):
            return "n", "a response is one answer"
        if self.max_tokens is not None:
            return "max_tokens", "it is called max_output_tokens here"
        if self.response_format is not None:
            return "response_format", "it is called text.format here"
        if self.prompt_logprobs is not None:
            return "prompt_logprobs", "responses have no place for them"
        if self.stream_options is not None and (
            self.stream_options.include_usage or self.stream_options.continuous_usage_stats
        ):
            return "stream_options", "usage is part of the last event anyway"
        return super().refused()


class CompactRequest(Sampling):
    """``input``: a conversation, or its part behind ``previous_response_id``; ``max_output_tokens`` of its summary.
    ``model`` must be named, which Open Responses asks for here alone."""

    model: str
    input: str | Objects | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None

    def refused(self) -> tuple[str, str] | None:
        if self.stream:
            return "stream", "a compaction is one answer"
        return super().refused()
