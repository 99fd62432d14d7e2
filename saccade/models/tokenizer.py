"""Text to token ids and back: a thin face over the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from saccade.errors import ModelError, RequestError, half_pair, shown
from saccade.models.checkpoint import first_line
from saccade.models.control_tokens import Change, ControlTokens
from saccade.models.template_probes import CallForm, as_part, call_form, reads_parts, through_template, with_calls
from saccade.models.templates import render
from saccade.models.token_texts import TokenBytes

# Any of these makes a folder a tokenizer; without one transformers may invent an empty tokenizer.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")

Message = Mapping[str, Any]

# Of transformers' own call, which are decided here.
_OWN_ARGUMENTS = {"conversation", "tokenize", "add_generation_prompt", "return_tensors", "return_dict", "padding"}
_OWN_ARGUMENTS |= {"truncation", "max_length", "tokenizer_kwargs", "chat_template", "continue_final_message"}


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer; one that only knows token ids if it holds none; ModelError if it is broken."""
    if not any((folder / name).is_file() for name in (*_FILES, *(p.name for p in folder.glob("*.tiktoken")))):
        return Tokenizer(None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers and transformers raise many kinds
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}") from error
    # The engine checks lengths against the model; the tokenizer's own limit would only warn.
    tokenizer.model_max_length = int(1e30)
    if not tokenizer.chat_template:  # processors of multimodal models had a file of their own for it
        tokenizer.chat_template = _template_of_processor(folder / "chat_template.json")
    return Tokenizer(tokenizer)


class Tokenizer:
    """``hf`` is transformers' tokenizer, or None for a checkpoint without one: then only token-id prompts work."""

    def __init__(self, hf: Any | None) -> None:
        self.hf = hf
        self.special_ids: frozenset[int] = frozenset(hf.all_special_ids) if hf is not None else frozenset()
        self._texts: dict[tuple[int, bool], str] = {}  # of tokens by themselves
        self.bytes = TokenBytes(self)
        self._backend = _backend(hf)
        self._control: ControlTokens | None = None  # once a conversation is rendered

    @property
    def available(self) -> bool:
        """False if the checkpoint has no tokenizer; then ``decode`` and streams give empty text."""
        return self.hf is not None

    @property
    def vocab_size(self) -> int:
        """Number of token ids the tokenizer knows, added tokens included (the model's may be padded to more)."""
        return len(self.hf) if self.hf is not None else 0

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence id; ``LoadedModel.eos_token_ids`` adds the generation config's."""
        eos = None if self.hf is None else self.hf.eos_token_id
        return () if eos is None else (int(eos),)

    @property
    def has_chat_template(self) -> bool:
        """True if ``apply_chat_template`` can work."""
        return self.hf is not None and bool(self.hf.chat_template)

    @cached_property
    def template_end(self) -> tuple[int, ...]:
        """The tokens that the chat template puts behind every message that is to be answered; none without a template,
        or where it adds nothing there."""
        if not self.has_chat_template:
            return ()
        try:
            one, other = ([{"role": "user", "content": text}] for text in ("a", "b c"))
            ends = [self.apply_chat_template(messages)[::-1] for messages in (one, other)]
        except RequestError:  # a template that wants more than a message
            return ()
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*ends))
        return tuple(token for token, _ in same)[::-1]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` adds those the tokenizer adds by default (a BOS, say).

        RequestError if there is no tokenizer or ``text`` is not valid Unicode text.
        """
        hf = self._require("give token ids instead of text")
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be text, got {type(text).__name__}")
        try:
            return list(hf.encode(text, add_special_tokens=add_special_tokens))
        except (UnicodeError, TypeError) as error:
            why = half_pair(text) or first_line(error)
            raise RequestError(f"the prompt is not valid Unicode text: {why}") from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; half a UTF-8 character reads as U+FFFD. Empty if there is no tokenizer."""
        if self.hf is None:
            return ""
        if self._backend is not None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        # Some checkpoints ask to tidy the spaces of English contractions, which would change text already streamed.
        return self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def text_of(self, token_id: int, skip_special_tokens: bool = True) -> str:
        """``decode`` of one token, remembered."""
        key = token_id, skip_special_tokens
        if (text := self._texts.get(key)) is None:
            text = self._texts[key] = self.decode([token_id], skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        allow_control_tokens: bool = False,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation through the checkpoint's chat template.

        Each message maps ``role`` and ``content`` (text, or a list of ``{"type": "text", "text": ...}``).
        ``template_kwargs`` are variables of the template, ``{"enable_thinking": False}`` say. What reads like a control
        token in messages or variables is text, unless ``allow_control_tokens``: then it is that token, and may end a
        turn or begin a system message. ``continue_final_message``: the prompt ends within the last message, where an
        answer goes on with it; without ``add_generation_prompt``. RequestError if there is no template, the messages
        are malformed, or the template rejects them.
        """
        extra = {} if template_kwargs is None else template_kwargs
        if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
            raise RequestError(
                f"chat_template_kwargs={shown(extra, 80)} must map names to values, as the template knows them"
            )
        if own := sorted(_OWN_ARGUMENTS & set(extra)):
            raise RequestError(
                f"chat_template_kwargs cannot set {', '.join(own)}; only variables of the template can be set"
            )
        hf = self._require("chat needs one")
        if not hf.chat_template:
            raise RequestError("this model has no chat template; give a plain prompt instead of messages")
        conversation = [_checked_message(index, message) for index, message in enumerate(_checked_list(messages))]
        if continue_final_message:
            if not conversation[-1]["content"]:
                raise RequestError("continue_final_message needs text to go on with; the last message has none")
            extra = {**extra, "continue_final_message": True}
        if any(one.get("tool_calls") for one in conversation):
            conversation = [with_calls(one, self._call_form) for one in conversation]
        if self._reads_parts:
            conversation = [{**one, "content": as_part(one["content"] or "")} for one in conversation]

        def rendered(change: Change) -> str:
            said, variables = change(conversation), change(dict(extra))
            return render(
                lambda: through_template(
                    hf,
                    [dict(one) for one in said],  # transformers marks the last one where an answer goes on with it
                    add_generation_prompt=add_generation_prompt,
                    **variables,
                ),
                hf.chat_template,
            )

        try:
            text = rendered(lambda given: given)
            if not allow_control_tokens:
                if self._control is None:
                    self._control = ControlTokens(hf)
                apart = self._control.told_apart(text, rendered, [conversation, dict(extra)])
                if apart is not None:
                    return self._control.encode(apart)
        except RequestError:
            raise
        except Exception as error:  # jinja's own, or whatever the template raises
            raise RequestError(f"the chat template rejects these messages: {first_line(error)}") from error
        return self.encode(text, add_special_tokens=False)  # templates write their own special tokens

    @cached_property
    def _reads_parts(self) -> bool:
        return reads_parts(self._require("chat needs one"))

    @cached_property
    def _call_form(self) -> CallForm:
        return call_form(self._require("chat needs one"))

    def words(self, texts: Iterable[str]) -> list[list[int]]:
        """The token lists that ``texts`` may come as: from the beginning of a text, and with a space before, where that
        makes another first token. RequestError if there is no tokenizer."""
        found: list[list[int]] = []
        for text in texts:
            bare = self.encode(text.lstrip(), add_special_tokens=False)
            spaced = self.encode(" " + text.lstrip(), add_special_tokens=False)
            found.append(bare)
            if spaced[:1] != bare[:1] and len(spaced) == len(bare):
                found.append(spaced)
        return [word for word in found if word]

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A fresh incremental detokeniser for one sequence of output tokens."""
        return TextStream(self, skip_special_tokens)

    def _require(self, way_out: str) -> Any:
        if self.hf is None:
            raise RequestError(f"this checkpoint has no tokenizer; {way_out}")
        return self.hf


def _template_of_processor(file: Path) -> str | None:
    try:
        given = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return given if isinstance(given, str) else None


def _backend(hf: Any) -> Any:
    """What decodes for ``hf``, where it does nothing besides: every token of every answer passes there, and
    transformers' own checks take most of the time. None for others."""
    kind, usual = type(hf), PreTrainedTokenizerFast
    plain = isinstance(hf, usual) and (kind.decode, kind._decode) == (usual.decode, usual._decode)
    return hf.backend_tokenizer if plain else None


def _checked_list(messages: Any) -> list[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of role and content dicts, got {type(messages).__name__}")
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    return list(messages)


def _checked_message(index: int, message: Any) -> dict[str, Any]:
    """``message`` with its content as one text; a tool call may go without content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"message {index} must be a dict with a role and a content, got {shown(message, 80)}")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    f"message {index} has a part of type {shown(kind, 60)}; models read text alone here: leave it out"
                )
        content = "\n".join(part["text"] for part in content)  # as vLLM joins them
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"message {index} ({message['role']}) must have text content, got {type(content).__name__}")
    return {**message, "content": content}


class TextStream:
    """Turns tokens into text as they come, never half a character, with the spaces a whole decode would give.

    A token's text can depend on the one before it (leading spaces) and bytes of one character can span tokens. So each
    step decodes a short window, from the last tokens that produced text, and emits what is new once it is complete.
    The pieces of ``step`` and ``flush`` together equal ``decode`` of all tokens. ``tokenizers.decoders.DecodeStream``
    does not serve: it keeps what an answer ends with for itself, and all bytes that are no text until some text comes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # tokens still needed
        self._emitted = 0  # how many of them have been emitted
        self._emitted_text = ""  # the decoded text of those

    def step(self, token_id: int) -> str:
        """Text that ``token_id`` completes; empty while a character is unfinished or for a skipped special token."""
        if not self._tokenizer.available or (self._skip and token_id in self._tokenizer.special_ids):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._emitted_text) or (text.endswith("�") and not self._hopeless()):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """What is left at the end: an unfinished character reads as U+FFFD."""
        text = self._decode(self._window) if self._window else ""
        return self._emit(text) if len(text) > len(self._emitted_text) else ""

    def _hopeless(self) -> bool:
        # A character has at most 4 bytes and a token at least one, so this tail is no character; do not let it grow.
        return len(self._window) - self._emitted >= 32

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted_text) :]
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        self._emitted_text = self._decode(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        if len(ids) == 1:
            return self._tokenizer.text_of(ids[0], self._skip)
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
