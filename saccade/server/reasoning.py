"""Splits what a model thinks from what it says. Harmony's channels are read by tool_formats/harmony.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from saccade.server.grammar_parts import after_thoughts
from saccade.server.tool_formats.source import overlap
from saccade.server.tool_formats.words import Words

HARMONY = "harmony"


@dataclass(frozen=True)
class ReasoningFormat:
    """``begin`` and ``end`` of the thoughts; ``inside``: an answer begins with thoughts whether it says so or not,
    unless its prompt or a grammar tells otherwise."""

    begin: str = "<think>"
    end: str = "</think>"
    inside: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own."""
        return self.begin, self.end

    def before(self, source: str, words: Words, opened: bool, calls: bool) -> str:
        """``source``, a grammar, behind thoughts, which the prompt has ``opened`` or the model may begin. ``calls``: it
        is one of calls, before which models break lines."""
        marks, gap = (self.begin, self.end), "/\\n{0,2}/" if calls else ""
        token = words.token(self.end) is not None
        return after_thoughts(source, gap, words(self.begin, marks), words(self.end, marks), opened, token)


FORMATS = {
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(inside=True),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    HARMONY: ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
}


def format_of(template: str) -> str | None:
    """The format in which a chat template marks thoughts; None where it tells of none."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    if "Here is my thought process" in template:
        return "granite"
    if "[THINK]" in template:
        return "mistral"
    if "<seed:think>" in template:
        return "seed_oss"
    if "</think>" not in template and "<think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


# How an answer begins: with thoughts, whether it says so or not; with thoughts where it says so; without any.
Beginning = Literal["thoughts", "either", "answer"]
_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates


def switched(variables: Mapping[str, Any], on: bool) -> bool:
    """Whether a request's variables for the chat template turn thoughts ``on``, or off."""
    return any(variables.get(name) is on for name in _SWITCHES)


def beginning(format: ReasoningFormat, prompt: str, variables: Mapping[str, Any], grammar: bool) -> Beginning:
    """How the answer to a prompt, of which ``prompt`` is the end at least, begins. What the template wrote there
    decides; then whether a ``grammar`` holds from the answer's beginning; then what models of the format do."""
    bare = prompt.rstrip()
    if bare.endswith(format.begin):
        return "thoughts"
    if bare.endswith(format.end):
        return "answer"
    return "thoughts" if format.inside and not grammar and not switched(variables, False) else "either"


class ReasoningReader:
    """Reads one answer piece by piece: pieces of thoughts, and of the rest. ``inside``: it begins with thoughts whether
    it says so or not; by default as the format has it. ``exact``: line breaks behind the thoughts belong to the
    answer."""

    def __init__(self, format: ReasoningFormat, inside: bool | None = None, exact: bool = False) -> None:
        self._format, self._held, self._exact = format, "", exact
        self._inside = format.inside if inside is None else inside
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
                self._state = "inside" if self._inside else "after"
        if self._state == "begun":
            self._held = self._held.lstrip("\n")
            self._state = "inside" if self._held else "begun"
        if self._state == "inside":
            thoughts, marker, rest = self._held.partition(format.end)
            if marker:
                self._held, self._state = rest, "after" if self._exact else "between"
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
