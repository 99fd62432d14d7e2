"""What a caller may give as a prompt: text, token ids, or vLLM's mappings of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import RequestError, shown

Prompt = str | Sequence[int] | Mapping[str, Any]  # a mapping: {"prompt": text} or {"prompt_token_ids": ids}

_KEYS = ("prompt", "prompt_token_ids")


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or many as a list; an empty list has none."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be text, token ids or a list of those, got {type(prompts).__name__}")
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def text_of(prompt: Prompt) -> str | None:
    """The prompt's text, where it has one."""
    given: Any = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return given if isinstance(given, str) else None


def encode(tokenizer: Any, prompt: Prompt, first: bool = True) -> list[int]:
    """Token ids of a prompt. ``first``: it begins a context, so the tokenizer's special tokens join it. Ids go before
    text where a mapping has both. RequestError for what is no prompt."""
    given: Any = prompt
    if isinstance(given, Mapping):
        data = given.get("multi_modal_data")
        if data is not None:
            kinds = ", ".join(map(str, data)) if isinstance(data, Mapping) else shown(data, 60)
            raise RequestError(f"a prompt has multi_modal_data ({kinds}); models read text alone here: leave it out")
        unknown = sorted(str(key) for key in given if key not in _KEYS)
        if unknown or not any(given.get(key) is not None for key in _KEYS):
            raise RequestError(
                f"a prompt with the keys {', '.join(map(str, given)) or '(none)'} cannot be read; give "
                "{'prompt': text} or {'prompt_token_ids': token ids}"
            )
        given = given["prompt"] if given.get("prompt_token_ids") is None else given["prompt_token_ids"]
    if isinstance(given, str):
        if not given:
            raise RequestError("the prompt is empty; give at least one token")
        return tokenizer.encode(given, add_special_tokens=first)
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        raise RequestError(f"a prompt must be text or a list of token ids, got {type(given).__name__}")
    return list(given)
