"""Footnotes: a number in brackets where they are referred to, and their text at the document's end."""

from __future__ import annotations


class Notes:
    """Footnotes in the order in which a text refers to them."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._numbers: dict[tuple[str, str], int] = {}

    def mark(self, kind: str, name: str, text: str) -> str:
        """``[3]`` for the note of that kind and name, which says ``text``; the same again for the same one."""
        number = self._numbers.get((kind, name))
        if number is None:
            self._texts.append(" ".join(text.split()))
            number = self._numbers[kind, name] = len(self._texts)
        return f"[{number}]"

    def at_end(self) -> str:
        """All of them, a line each, behind a text."""
        lines = [f"[{number}] {text}" for number, text in enumerate(self._texts, 1) if text]
        return "\n\n" + "\n".join(lines) if lines else ""
