"""Texts to hide things in: the sentences of a file of the user's, for tasks that take ``haystack="file:PATH"``."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from saccade.errors import RequestError

PROSE = "prose"  # made up, the default
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+")


def file_of(haystack: str) -> Path | None:
    """PATH of ``file:PATH``; None for anything else."""
    kind, _, path = haystack.partition(":")
    return Path(path) if kind == "file" and path else None


def split_sentences(text: str) -> list[str]:
    """Sentences by rule: cut after ``.``, ``!`` or ``?`` with what closes a quotation; white space made single."""
    cuts = [match.start() + len(match[0].rstrip()) for match in _SENTENCE_END.finditer(text)]
    parts = (text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)]))
    return [sentence for part in parts if (sentence := " ".join(part.split()))]


@lru_cache(maxsize=4)
def read_text(path: Path) -> tuple[str, ...]:
    """The sentences of a user's text file. Raises RequestError if it cannot be read or is empty."""
    try:
        sentences = tuple(split_sentences(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"haystack=file:{path} cannot be read as UTF-8 text: {error}") from None
    if not sentences:
        raise RequestError(f"haystack=file:{path} is empty")
    return sentences
