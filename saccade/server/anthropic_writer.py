"""The blocks of a message, and the events that tell of them, in order."""

from __future__ import annotations

import hashlib
from typing import Any

from saccade.server.errors import ApiError
from saccade.server.events import named_event
from saccade.server.messages import loads
from saccade.server.reader import Delta
from saccade.server.shape import check_shape
from saccade.server.tool_formats.json_reading import DEEPEST
from saccade.server.tool_formats.parts import Arguments, Begun, Ended

JSON = dict[str, Any]
_TEXTS = {"text": "text", "thinking": "thinking"}  # where a block of a type has its text


class BlockWriter:
    """``content``: the blocks that are complete. One at most is open. ``shown``: whether the text of thoughts is told;
    ``thoughts`` has it anyway."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self.content: list[JSON] = []
        self._thoughts: list[str] = []
        self._open: str | None = None  # its type
        self._call: JSON = {}  # the one that is open, or was
        self._text: list[str] = []  # of the open block

    @property
    def thoughts(self) -> str:
        """All of them."""
        return "".join(self._thoughts)

    @staticmethod
    def event(kind: str, **fields: Any) -> bytes:
        """One event, whose name is its type."""
        return named_event(kind, {"type": kind, **fields})

    def feed(self, delta: Delta) -> list[bytes]:
        """Take over what is new; the events that say so."""
        events: list[bytes] = []
        if delta.thoughts:
            self._thoughts.append(delta.thoughts)
            events += self._say("thinking", delta.thoughts)
        for part in delta.parts:
            if isinstance(part, Begun):
                events += self._begin_call(part)
            elif isinstance(part, Arguments):
                text = "{}" if part.text.strip() == "null" and not self._text else part.text
                self._text.append(text)
                events.append(self._delta("input_json_delta", partial_json=text))
            elif not isinstance(part, str):
                events += self._end_call(isinstance(part, Ended))
            elif part:
                events += self._say("text", part)
        return events

    def end(self) -> list[bytes]:
        """Close what is open."""
        kind, text = self._open, "".join(self._text)
        if kind is None:
            return []
        if kind == "tool_use":
            return self._end_call(False)
        self._open, self._text = None, []
        events, block = [], {"type": kind, _TEXTS[kind]: text}
        if kind == "thinking":
            block["signature"] = _signature(text)
            block["thinking"] = text if self._shown else ""
            events.append(self._delta("signature_delta", signature=block["signature"]))
        events.append(self._stop())
        self.content.append(block)
        return events

    def _say(self, kind: str, text: str) -> list[bytes]:
        events = []
        if self._open != kind:
            events += self.end()
            empty = {"type": kind, _TEXTS[kind]: "", **({"signature": ""} if kind == "thinking" else {})}
            events.append(self._start(empty))
            self._open = kind
        self._text.append(text)
        if kind == "text" or self._shown:
            events.append(self._delta(f"{kind}_delta", **{_TEXTS[kind]: text}))
        return events

    def _begin_call(self, call: Begun) -> list[bytes]:
        events = self.end()
        self._call = {"type": "tool_use", "id": call.id.replace("call_", "toolu_", 1), "name": call.name}
        self._open, self._text = "tool_use", []
        return [*events, self._start({**self._call, "input": {}})]

    def _end_call(self, whole: bool) -> list[bytes]:
        """Close the call that is open, if one is. Of one that is not ``whole`` no more than its beginning was told."""
        if self._open != "tool_use":
            return []
        events, arguments = [self._stop()], "".join(self._text)
        given = _input(arguments) if whole else {}
        self.content.append({"type": "text", "text": arguments} if given is None else {**self._call, "input": given})
        self._open, self._text = None, []
        return events

    def _start(self, block: JSON) -> bytes:
        return self.event("content_block_start", index=len(self.content), content_block=block)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return self.event("content_block_delta", index=len(self.content), delta={"type": kind, **fields})

    def _stop(self) -> bytes:
        return self.event("content_block_stop", index=len(self.content))


def _input(arguments: str) -> JSON | None:
    """Arguments as an object; None for those that no client could send back: they lie too deep."""
    try:
        check_shape(arguments.encode("utf-8", "surrogatepass"), DEEPEST)
        given = loads(arguments)
    except (ApiError, ValueError, RecursionError):
        return None
    return {} if given is None else given if isinstance(given, dict) else None


def _signature(thoughts: str) -> str:
    """Clients want one; nothing is made of it when it comes back."""
    return hashlib.blake2b(thoughts.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
