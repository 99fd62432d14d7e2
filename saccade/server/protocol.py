"""What requests may hold. Names and meanings are OpenAI's, then vLLM's, then our own.

A field that is not listed is refused by its name, and so is one that is listed but cannot be honoured (see
``refused``): an answer that silently is not what was asked for misleads.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from saccade.errors import finite_number

JSON = dict[str, Any]


def _first_wrong(given: Any) -> Any:
    """Of numbers by name the first that is none, if there is one: pydantic leaves lists at their first error, but
    writes one for each entry of a dictionary."""
    if isinstance(given, dict):
        return next(({name: value} for name, value in given.items() if not finite_number(value)), given)
    return given


# Lists are left at the first element that does not fit: an error for each of a million would cost gigabytes.
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
Numbers = Annotated[list[float], Field(fail_fast=True)]
Objects = Annotated[list[JSON], Field(fail_fast=True)]
_Prompts = Annotated[list[Tokens], Field(fail_fast=True)]
_NumbersByName = Annotated[dict[str, float], BeforeValidator(_first_wrong)]


class Body(BaseModel):
    """Of fields that are unknown the first alone is told, whatever their number."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next((name for name in given if name not in known), None)
        return {name: value for name, value in given.items() if name in known or name == first}


class StreamOptions(Body):
    """``include_usage``: a last chunk tells what the answer cost; ``continuous_usage_stats``: every chunk does."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # a client may ask for none, and never gets any


class StructuredOutputs(Body):
    """One of these, which the answer then follows."""

    json_: JSON | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: JSON | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Ours(Body):
    """Fields that no other server has: ``policy``, ``session_id`` (the header ``x-session-id`` too), ``report`` for all
    that was counted, ``deadline_seconds``, ``audit``, ``audit_steps``, ``target``,
    ``certify`` and ``bounds`` (docs/audit.md)."""

    policy: str | JSON | None = None
    session_id: str | None = None
    report: bool | None = None
    deadline_seconds: float | None = Field(default=None, ge=0.001, le=86400)
    audit: float | None = None
    audit_steps: float | None = None
    target: float | None = None
    certify: Numbers | None = None
    bounds: float | None = None


class Sampling(Ours):
    """How tokens are chosen, and what every completion shares."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: _NumbersByName | None = None
    bad_words: Texts | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=1)
    return_tokens_as_token_ids: bool | None = None
    allow_control_tokens: bool | None = None
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    # Change no answer of this server: who asks, what for, and where such answers lie.
    user: str | None = None
    metadata: JSON | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_salt: str | None = None
    # Honoured at one value alone.
    priority: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Tokens | None = None
    logits_processors: list[Any] | None = None
    kv_transfer_params: JSON | None = None

    def refused(self) -> tuple[str, str] | None:
        """A field that asks for what cannot be done, and why."""
        if self.priority:
            return "priority", "requests are served in the order of their arrival; leave it out or give 0"
        if self.best_of is not None and self.best_of != (self.n or 1):
            return "best_of", "samples are not ranked; ask for n of them"
        if self.use_beam_search:
            return "use_beam_search", "there is no beam search"
        if self.spaces_between_special_tokens is False:
            return "spaces_between_special_tokens", "special tokens are shown as the tokenizer writes them"
        for name in ("allowed_token_ids", "logits_processors", "kv_transfer_params"):
            if getattr(self, name):
                return name, "it is not supported; logit_bias and structured_outputs steer answers"
        if self.stream_options is not None and not self.stream:
            return "stream_options", "it is for streams; set stream=true"
        if self.stream and self.prompt_logprobs is not None:
            return "prompt_logprobs", "they cannot be streamed; set stream=false"
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            return "stream_options", "include_obfuscation is not supported"
        return None


class CompletionRequest(Sampling):
    """``POST /v1/completions``. ``prompt``: text, tokens, or a list of either. A form that does not fit is left at its
    first element: an error for each of a hundred thousand tokens would hold up every stream."""

    prompt: str | Tokens | _Prompts | Texts = Field(union_mode="left_to_right")
    logprobs: int | None = Field(default=None, ge=0, le=100)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None

    def refused(self) -> tuple[str, str] | None:
        if self.suffix:
            return "suffix", "text is completed at its end alone"
        if self.allow_control_tokens is False:
            return "allow_control_tokens", "a prompt is encoded with its control tokens; give token ids, or use a chat"
        if self.stream and self.echo and self.logprobs is not None:
            return "logprobs", "those of an echoed prompt cannot be streamed; set stream=false"
        return super().refused()


class Template(Body):
    """How a conversation becomes a prompt. ``continue_final_message``: its last message is left open."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JSON | None = None
    add_special_tokens: bool | None = None
    allow_control_tokens: bool | None = None


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Objects = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=100)
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: JSON | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    tools: Objects | None = None
    tool_choice: str | JSON | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    # Honoured at one value alone.
    modalities: Texts | None = None
    audio: JSON | None = None
    prediction: JSON | None = None  # a guess of the answer: it would change the speed alone
    verbosity: str | None = None
    web_search_options: JSON | None = None
    functions: Objects | None = None
    function_call: str | JSON | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    documents: Objects | None = None
    mm_processor_kwargs: JSON | None = None

    def refused(self) -> tuple[str, str] | None:
        if self.modalities not in (None, ["text"]):
            return "modalities", "answers are text"
        if self.functions or self.function_call:
            return "functions" if self.functions else "function_call", "use tools and tool_choice"
        if self.chat_template is not None:
            return "chat_template", "templates come with the model alone; chat_template_kwargs sets its variables"
        if self.verbosity not in (None, "medium"):
            return "verbosity", "the model knows none; say it in a message"
        if self.add_special_tokens:
            return "add_special_tokens", "the chat template writes them"
        if self.continue_final_message and self.add_generation_prompt:
            return "continue_final_message", "an answer that goes on has no add_generation_prompt"
        for name in ("audio", "web_search_options", "documents", "mm_processor_kwargs"):
            if getattr(self, name):
                return name, "the model reads and writes the text of messages alone"
        if self.store:
            return "store", "chat completions are not stored; /v1/responses are"
        if self.top_logprobs is not None and not self.logprobs:
            return "top_logprobs", "it needs logprobs=true"
        return super().refused()


class TokenizeRequest(Template):
    """``POST /tokenize``: a ``prompt``, or ``messages`` as the chat template writes them."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    return_token_strs: bool | None = None
    tools: Objects | None = None


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Tokens


class DocumentRequest(Body):
    """``POST /v1/documents``: a file by its ``name`` and its bytes, ``data``, in base64."""

    name: str = "document"
    data: str


class SelectionMapRequest(Body):
    """``POST /v1/selection_maps``: a ``prompt`` or ``messages``, answered greedily with ``max_tokens`` under ``policy``
    while what ``layers`` read is drawn, at most ``pixels`` cells a side."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    chat_template_kwargs: JSON | None = None
    allow_control_tokens: bool | None = None
    policy: str | JSON | None = None
    layers: Tokens | None = Field(default=None, max_length=1024)
    pixels: int = Field(default=96, ge=16, le=256)
    max_tokens: int = Field(default=33, ge=1, le=65)
