"""Control tokens in what people write: ``<|im_end|>`` inside a message is text, and ends no turn.

A template writes control tokens and contents into one text. To know which is whose, the conversation is rendered once
more with private characters in the place of those that a control token begins with, wherever they stand in contents.
What is still a control token then is the template's own. The text is tokenized as a whole, so that ids are the ordinary
ones everywhere else: by a copy of the tokenizer that knows control tokens under other names, which only the template's
own bear.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from saccade.errors import RequestError, shown
from saccade.models.checkpoint import first_line

PRIVATE = range(0x100000, 0x10FFFE)  # code points that no standard gives a meaning
NAME = 8  # private characters of a control token's other name: it cannot be guessed
_TAG = r"/?[\w-]+[>\]]"  # behind < or [: what templates look for in contents, </think> say

Change = Callable[[Any], Any]


class ControlTokens:
    """Those of transformers' tokenizer ``hf``: its special tokens, and added tokens that its chat template writes
    around the turns of a plain conversation (some checkpoints do not call these special). Others, ``<think>`` or
    ``<tool_call>`` say, are a model's ordinary language, and stay what they are in contents."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        added = {str(token.content): (number, bool(token.special)) for number, token in _added(hf).items()}
        marks = _written(hf, [text for text, (_, special) in added.items() if not special])
        self.ids = {text: number for text, (number, special) in added.items() if text and (special or text in marks)}
        self._pattern = _any_of(self.ids)
        self._firsts = sorted({text[0] for text in self.ids})
        self._lock = threading.Lock()
        self._copy: _Renamed | None = None
        self._failed: str | None = None  # why there can be none: that is found once, over a whole vocabulary

    def told_apart(self, text: str, render: Callable[[Change], str], given: Any) -> str | None:
        """``text``, a rendered conversation, with the template's own control tokens under their other names; None where
        contents brought none. ``render``: the same of contents changed by a function. ``given``: all that clients
        wrote: dicts, lists and texts."""
        if not self.ids or not any(first in one for one in _texts(given) for first in self._firsts):
            return None
        if self._pattern.search(text) is None:
            return None
        masks = self._masks(text)
        original = {mask: first for first, mask in masks.items()}
        original |= {json.dumps(mask)[1:-1]: first for mask, first in original.items()}  # of templates that write ASCII
        back = _any_of(original)
        masked = ""
        for places in self._places():  # a template that looks into contents may answer otherwise to the first ones
            masked = render(_masking(places, masks))
            if back.sub(lambda found: original[found[0]], masked) == text:
                break
        names = self._renamed().names
        whose = re.compile(f"({self._pattern.pattern})|({back.pattern})")
        count = len(self._pattern.findall(back.sub(lambda found: original[found[0]], masked)))
        if count == len(self._pattern.findall(masked)):
            return None
        return whose.sub(lambda found: names[found[1]] if found[1] else original[found[0]], masked)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text from :meth:`told_apart`."""
        return self._renamed().encode(text)

    def _places(self) -> Iterator[re.Pattern[str]]:
        """Where contents may not begin a control token, from most to least: everywhere; but for plain tags; where a
        whole one stands."""
        firsts = "[" + "".join(map(re.escape, self._firsts)) + "]"
        yield re.compile(firsts)
        yield re.compile(f"{self._pattern.pattern}|{firsts}(?!{_TAG})")
        yield self._pattern

    def _masks(self, text: str) -> dict[str, str]:
        """A private character for each first character of control tokens, none of which ``text`` has."""
        while True:
            start = PRIVATE.start + secrets.randbelow(len(PRIVATE) - len(self._firsts))
            masks = {first: chr(start + number) for number, first in enumerate(self._firsts)}
            if not any(mask in text for mask in masks.values()):
                return masks

    def _renamed(self) -> _Renamed:
        with self._lock:
            if self._copy is None and self._failed is None:
                try:
                    self._copy = _Renamed(self.hf, self.ids)
                except Exception as error:
                    why = f" ({type(error).__name__}: {first_line(error)})"
                    self._failed = (
                        f"messages hold {shown(next(iter(self.ids)), 60)} or another control token as text, which this "
                        f"checkpoint's tokenizer cannot tell apart{why}; remove it, or give allow_control_tokens=True"
                    )
            if self._copy is None:
                raise RequestError(self._failed)
            return self._copy


class _Renamed:
    """A copy of ``hf`` with other ``names`` for the control tokens ``ids``."""

    def __init__(self, hf: Any, ids: Mapping[str, int]) -> None:
        if not isinstance(hf, PreTrainedTokenizerFast):
            raise ValueError("it is a slow one, without tokenizer.json")
        self.names = {text: "".join(chr(secrets.choice(PRIVATE)) for _ in range(NAME)) for text in ids}
        data = json.loads(hf.backend_tokenizer.to_str())
        data["truncation"] = data["padding"] = data["post_processor"] = None
        for token in data["added_tokens"]:
            token["content"] = self.names.get(token["content"], token["content"])
        self._core = Core.from_str(json.dumps(data))
        self._control = frozenset(ids.values())
        self._texts = {number: text for text, number in ids.items()}
        # The copy numbers the names anew, and what was added behind them.
        self._ids: dict[int, int] = {}
        for text, number in {str(token.content): number for number, token in _added(hf).items()}.items():
            found = self._core.token_to_id(self.names.get(text, text))
            if found is not None:
                self._ids[found] = number
        self._own = {self._core.token_to_id(name) for name in self.names.values()}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for found in self._core.encode(text, add_special_tokens=False).ids:
            number = self._ids.get(found, found)
            if number in self._control and found not in self._own:  # a vocabulary has it as text, too
                ids += self._letters(self._texts[number])
            else:
                ids.append(number)
        return ids

    def _letters(self, text: str) -> list[int]:
        """A control token's text, letter by letter."""
        return [token.id for letter in text for token in self._core.model.tokenize(letter)]


def _added(hf: Any) -> Mapping[int, Any]:
    found: Mapping[int, Any] = getattr(hf, "added_tokens_decoder", None) or {}
    return found


def _written(hf: Any, texts: list[str]) -> set[str]:
    """Which of ``texts`` the template writes around plain turns. White space and bare words are none."""
    texts = [text for text in texts if re.search(r"\w", text) and not text[0].isalnum() and not text[0].isspace()]
    turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    for conversation in (turns, turns[1:]) if texts and getattr(hf, "chat_template", None) else ():
        try:
            text = hf.apply_chat_template(conversation, tokenize=False)
        except Exception:  # some know no system
            continue
        return set(_any_of(texts).findall(text))
    return set()


def _any_of(texts: Any) -> re.Pattern[str]:
    """Any of ``texts``, the longest first; nothing at all where there is none."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")


def _texts(given: Any) -> Iterator[str]:
    """All texts in dicts and lists, names among them."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(given, (list, tuple)):
        for value in given:
            yield from _texts(value)


def _masking(places: re.Pattern[str], masks: Mapping[str, str]) -> Change:
    """Changes all texts in dicts and lists: the first characters of ``places`` become their masks."""

    def change(given: Any) -> Any:
        if isinstance(given, str):
            return places.sub(lambda found: masks[found[0][0]] + found[0][1:], given)
        if isinstance(given, Mapping):
            return {change(key): change(value) for key, value in given.items()}
        if isinstance(given, (list, tuple)):
            return [change(value) for value in given]
        return given

    return change
