"""What ``POST /v1/messages`` may hold (Anthropic's Messages API)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from saccade.server.protocol import JSON, Body, Objects, Sampling, Texts

LEAST_BUDGET = 1024  # tokens of thoughts, as Anthropic has it


class Thinking(Body):
    """``display``: ``omitted`` leaves the text of thoughts out."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: JSON = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


_REFUSED = {
    "container": "no tools run here",
    "mcp_servers": "no tools run here; give them as tools, and call them yourself",
    "stop": "it is called stop_sequences here",
    "response_format": "it is called output_config.format here",
    "prompt_logprobs": "messages have no place for them",
    "stream_options": "usage is part of a stream anyway",
}
# Of context_management: thoughts of earlier turns are the chat template's business, whatever is asked for.
_EDITS = "clear_thinking_20251015"


class Prompt(Sampling):
    """What becomes the prompt. ``system``: text, or blocks of it."""

    model: str
    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: JSON | None = None
    # Change no answer of this server: all that can be reused is.
    cache_control: JSON | None = None
    inference_geo: str | None = None
    diagnostics: JSON | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Honoured at one value alone.
    speed: str | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: JSON | None = None

    def refused(self) -> tuple[str, str] | None:
        for name, why in _REFUSED.items():
            if getattr(self, name):
                return name, why
        if self.n not in (None, 1):
            return "n", "a message is one answer"
        if self.speed not in (None, "standard"):
            return "speed", "there is one speed"
        edits = (self.context_management or {}).get("edits") or []
        if not isinstance(edits, list) or any(not isinstance(one, dict) or one.get("type") != _EDITS for one in edits):
            return "context_management", f"of edits this server knows {_EDITS} alone"
        return super().refused()


class CountRequest(Prompt):
    """``POST /v1/messages/count_tokens``."""


class MessagesRequest(Prompt):
    """``POST /v1/messages``. ``max_tokens``: most tokens of the answer; what the context has no room for is cut."""

    max_tokens: int
    stop_sequences: Texts | None = None

    def refused(self) -> tuple[str, str] | None:
        thinking = self.thinking
        if thinking is not None and thinking.type == "enabled":
            budget = thinking.budget_tokens
            if budget is None or not LEAST_BUDGET <= budget < self.max_tokens:
                return "thinking", f"budget_tokens must be {LEAST_BUDGET} or more, and less than max_tokens"
        return super().refused()
