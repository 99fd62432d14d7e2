"""What single tokens are in a text: their bytes, the text that they complete, and where it stands.

A character may be spread over several tokens, so a token's bytes come from the vocabulary, never from decoded text: a
part of a character has none. The bytes of all tokens are those of the text. A token that ends a character bears it, and
those before it have no text of their own.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from saccade.models.tokenizer import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """``data``: the token's bytes, None for one that is no part of the text. ``offset``: characters of the text before
    it."""

    text: str
    data: bytes | None
    offset: int


class TokenBytes:
    """The bytes of a tokenizer's tokens: letters of a byte-level vocabulary are bytes, ``<0xE2>`` is one where the
    decoder says so, and other tokens are text, as they read behind another one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer.hf, "backend_tokenizer", None)
        self._name = None if backend is None else backend.id_to_token
        kinds = set() if backend is None or backend.decoder is None else _kinds(backend.decoder)
        self._letters = _byte_letters() if "ByteLevel" in kinds else {}
        self._fallback = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}
        self._before: list[int] | None = None  # a token that others are decoded behind

    def of(self, token: int, first: bool = False) -> bytes:
        """``first``: in the beginning of a text, where some decoders leave a space out. Empty for a token that the
        tokenizer does not know."""
        data = self._known.get(token)
        if data is None:
            data = self._known[token] = self._read(token)
        if first and data[:1] == b" ":
            return self._tokenizer.text_of(token, False).encode("utf-8", "replace")
        return data

    def _read(self, token: int) -> bytes:
        name = None if self._name is None else self._name(token)
        if name is not None and self._letters:
            parts = [self._letters.get(letter) for letter in name]
            return name.encode() if None in parts else bytes(part for part in parts if part is not None)
        if name is not None and self._fallback and (found := _FALLBACK.fullmatch(name)):
            return bytes([int(found[1], 16)])
        tokenizer = self._tokenizer
        if name is None:
            return tokenizer.text_of(token, False).encode("utf-8", "replace")
        if self._before is None:
            self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        before = tokenizer.decode(self._before, False)
        return tokenizer.decode([*self._before, token], False)[len(before) :].encode("utf-8", "replace")


class TokenTexts:
    """Tokens of one text in their order. ``skip``: special tokens are no part of it."""

    def __init__(self, tokenizer: Tokenizer, skip: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._first = True  # nothing of the text came yet
        self._open = b""  # of a character that is not complete
        self._length = 0

    def take(
        self, token: int, piece: str, others: Iterable[int] = (), ends: bool = False
    ) -> tuple[TokenText, dict[int, TokenText]]:
        """The next token, and what others would have been in its place. ``piece``: what is new of the text with it.
        ``ends``: it ends the text, and is no part of it."""
        start, before = self._length, self._open
        named = {other: self._named(other, start) for other in others}
        mine = self._named(token, start)
        if mine.data is None or ends:
            return mine._replace(data=None), named
        self._length += len(piece)
        self._first, self._open = False, _tail(before + mine.data)
        if _whole(mine.data) is None:
            mine = mine._replace(text=piece)
        elif piece.endswith(mine.text):
            mine = mine._replace(offset=self._length - len(mine.text))
        return mine, named

    def _named(self, token: int, offset: int) -> TokenText:
        tokenizer = self._tokenizer
        if self._skip and not tokenizer.text_of(token, True) and (name := tokenizer.text_of(token, False)):
            return TokenText(name, None, offset)
        data = tokenizer.bytes.of(token, self._first)
        text = _whole(data)
        if text is None:
            text = codecs.getincrementaldecoder("utf-8")("replace").decode(self._open + data)
        return TokenText(text, data, offset)


def _whole(data: bytes) -> str | None:
    """The text of ``data``; None where it begins or ends within a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _tail(data: bytes) -> bytes:
    """What ``data`` ends with of a character that is not complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder's parts."""
    found: set[str] = set()

    def look(part: Any) -> None:
        if isinstance(part, dict):
            found.add(str(part.get("type")))
            for value in part.values():
                look(value)
        elif isinstance(part, list):
            for value in part:
                look(value)

    look(json.loads(decoder.__getstate__()))
    return found


def _byte_letters() -> dict[str, int]:
    """The letter of each byte in a byte-level vocabulary: printable ones stand for themselves, the others follow from
    U+0100 on in their order."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    rest = sorted(set(range(256)) - set(own.values()))
    return own | {chr(256 + number): byte for number, byte in enumerate(rest)}
