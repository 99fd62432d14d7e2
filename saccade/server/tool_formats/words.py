"""Texts of grammars, some of which are single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any


class Words:
    """``hf``: transformers' tokenizer, or None. An added token is no text to llguidance: it must be asked for by its
    number, and the template's own marks are such tokens wherever a tokenizer has them."""

    def __init__(self, hf: Any) -> None:
        added = getattr(hf, "added_tokens_decoder", None) or {}
        self._ids = {str(token.content): number for number, token in added.items()}
        self._special = {str(token.content) for token in added.values() if token.special}

    def __call__(self, text: str, marks: Collection[str] = ()) -> str:
        """``text`` as Lark has it: strings, and tokens for those of ``marks`` that are some. Empty for no text."""
        known = sorted((mark for mark in marks if mark in self._ids), key=len, reverse=True)
        if not known:
            return json.dumps(text) if text else ""
        pieces = re.split("(" + "|".join(map(re.escape, known)) + ")", text)
        return " ".join(
            f"<[{self._ids[piece]}]>" if index % 2 else json.dumps(piece) for index, piece in enumerate(pieces) if piece
        )

    def token(self, text: str) -> int | None:
        """The token that ``text`` is by itself."""
        return self._ids.get(text)

    def hidden(self, marks: Collection[str]) -> bool:
        """Whether one of ``marks`` is a special token, which answers do not show unless they are told to."""
        return any(mark in self._special for mark in marks)
