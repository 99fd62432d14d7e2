"""Texts of any number of words: prose, or what a user's file has from a random sentence on."""

from __future__ import annotations

import re

from saccade import prose
from saccade.errors import RequestError
from saccade.eval.haystack import PROSE, file_of, read_text

_CLOSING = ".!?\"'”’)"
_SPACE = re.compile(r"\s+")
_LEAST = 12  # sentences of a file
_CHARACTERS = 16  # of prose for a token of the length: more than any tokenizer takes together


class Words:
    """A text as its first so many words. ``most``: how many there are."""

    def __init__(self, haystack: str, length: int, start: int, part: int = 0, parts: int = 1) -> None:
        """``haystack``: "prose", or "file:PATH" (UTF-8), of which each of ``parts`` has a stretch of its own.
        ``length``: in tokens; more prose is never needed. ``start``: a random number that decides where the text
        begins."""
        path = file_of(haystack)
        if path is not None:
            sentences = read_text(path)
            if len(sentences) < _LEAST:
                raise RequestError(
                    f"haystack={haystack} has {len(sentences)} sentences, which end in . ! or ? and white space; at "
                    f"least {_LEAST} are needed"
                )
            begin = (start + part * len(sentences) // parts) % len(sentences)
            stretch = -(-len(sentences) // parts)
            self._text = " ".join([*sentences, *sentences][begin : begin + stretch])
        elif haystack == PROSE:
            self._text = prose.generate(_CHARACTERS * length, start + part)
        else:
            raise RequestError(f"haystack={haystack!r} is unknown; known: {PROSE}, file:PATH")
        self._ends = [0, *(match.start() for match in _SPACE.finditer(self._text)), len(self._text)]
        self.most = len(self._ends) - 1

    def first(self, count: int) -> str:
        """The first ``count`` words; three dots stand for the rest of a sentence that they cut."""
        text = self._text[: self._ends[count]]
        return text if not text or text[-1] in _CLOSING else f"{text}..."
