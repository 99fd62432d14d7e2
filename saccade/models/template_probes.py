"""What a chat template reads, found out by rendering small conversations through it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from saccade.models.templates import render

Message = Mapping[str, Any]
_NAME, _KEY, _VALUE = "saccade_name", "saccade_key", "saccade_value"


class CallForm(NamedTuple):
    """How earlier calls reach a template. ``text``: arguments are JSON as text, not an object. ``bare``: the content of
    a message that only calls is null, not empty."""

    text: bool = False
    bare: bool = False


def as_part(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def reads_parts(hf: Any) -> bool:
    """Whether the chat template of ``hf``, transformers' tokenizer, drops contents that are text, and shows those that
    are a list of parts, as some of multimodal models do."""

    def shows(content: Any) -> bool:
        return _VALUE in _rendered(hf, [{"role": "user", "content": content}])

    return not shows(_VALUE) and shows(as_part(_VALUE))


def call_form(hf: Any) -> CallForm:
    """The first form of calls that the chat template shows whole. DeepSeek's templates join arguments to text, and show
    no calls beside a content that is empty."""
    for form in (CallForm(), CallForm(bare=True), CallForm(True, True), CallForm(text=True)):
        function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
        call = {"id": "call00000", "type": "function", "function": function}  # Mistral's wants nine letters and digits
        asked: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        text = _rendered(hf, [with_calls(one, form) for one in asked])
        if all(one in text for one in (_NAME, _KEY, _VALUE)):
            return form
    return CallForm()


def with_calls(message: Message, form: CallForm) -> dict[str, Any]:
    """``message`` with its calls in a form."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    made = {**message, "content": message["content"] or (None if form.bare else "")}
    if form.text:
        made["tool_calls"] = [_as_text(call) for call in calls]
    return made


def _as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def through_template(hf: Any, conversation: list[Any], **variables: Any) -> str:
    """The text of a conversation. transformers leaves out contents that are null, which some templates ask for: where
    there is one, its own way is gone past."""
    if all(one.get("content") is not None for one in conversation):
        return str(hf.apply_chat_template(conversation, tokenize=False, **variables))
    variables = {**hf.special_tokens_map, **variables}
    template = hf.get_chat_template(None, variables.get("tools"))
    rendered: Any = render_jinja_template([conversation], chat_template=template, **variables)
    return str(rendered[0][0])


def _rendered(hf: Any, conversation: list[Any]) -> str:
    try:
        return render(lambda: through_template(hf, conversation), hf.chat_template)
    except Exception:  # rendering the conversation itself says so
        return ""
