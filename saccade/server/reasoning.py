"""Splits what a model thinks from what it says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """``begin`` and ``end`` of the thoughts; ``inside``: the answer begins with thoughts whether it says so or not,
    because the template has written ``begin`` already."""

    begin: str = "<think>"
    end: str = "</think>"
    inside: bool = False


FORMATS = {
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(inside=True),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}


class ReasoningReader:
    """Reads one answer piece by piece: pieces of thoughts, and of the rest."""

    def __init__(self, format: ReasoningFormat) -> None:
        self._format, self._held = format, ""
        self._state = "before"  # the thoughts; then "begun", "inside", "between" and "after" them

    def feed(self, text: str, final: bool = False) -> tuple[str, str]:
        """(thoughts, rest) of what may be told now; what may still become a marker is held back."""
        format, thoughts = self._format, ""
        self._held += text
        if self._state == "before":
            bare = self._held.lstrip()
            if bare.startswith(format.begin):
                self._held, self._state = bare[len(format.begin) :], "begun"
            elif format.begin.startswith(bare) and not final:
                return "", ""
            else:
                self._state = "inside" if format.inside else "after"
        if self._state == "begun":
            self._held = self._held.lstrip("\n")
            self._state = "inside" if self._held else "begun"
        if self._state == "inside":
            thoughts, marker, rest = self._held.partition(format.end)
            if marker:
                self._held, self._state = rest.lstrip("\n"), "between"
            else:
                kept = 0 if final else overlap(self._held, format.end)
                cut = len(self._held) - kept
                thoughts, self._held = self._held[:cut], self._held[cut:]
                return thoughts, ""
        if self._state == "between":
            self._held = self._held.lstrip("\n")
            if not self._held:
                return thoughts, ""
            self._state = "after"
        rest, self._held = self._held, ""
        return thoughts, rest


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
