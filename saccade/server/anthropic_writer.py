"""The blocks of a message, and the events that tell of them, in order."""

from __future__ import annotations

import hashlib
from typing import Any

from saccade.server.errors import ApiError
from saccade.server.events import named_event
from saccade.server.messages import MOST_NESTING, loads
from saccade.server.reader import Delta
from saccade.server.shape import check_shape
from saccade.server.tool_json import Call

JSON = dict[str, Any]
_TEXTS = {"text": "text", "thinking": "thinking"}  # where a block of a type has its text
_LEAST_LEFT = 8  # brackets around arguments that come back in a message


class BlockWriter:
    """``content``: the blocks that are complete. One at most is open. ``shown``: whether the text of thoughts is told;
    ``thoughts`` has it anyway."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self.content: list[JSON] = []
        self._thoughts: list[str] = []
        self._open: str | None = None  # its type
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
            if isinstance(part, Call):
                events += self._call(part)
            elif part:
                events += self._say("text", part)
        return events

    def end(self) -> list[bytes]:
        """Close what is open."""
        kind, text = self._open, "".join(self._text)
        if kind is None:
            return []
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

    def _call(self, call: Call) -> list[bytes]:
        given = _input(call.arguments)
        if given is None:
            return self._say("text", call.arguments)
        events = self.end()
        block = {"type": "tool_use", "id": call.id.replace("call_", "toolu_", 1), "name": call.name}
        text = "{}" if call.arguments.strip() == "null" else call.arguments
        events += [
            self._start({**block, "input": {}}),
            self._delta("input_json_delta", partial_json=text),
            self._stop(),
        ]
        self.content.append({**block, "input": given})
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
        check_shape(arguments.encode("utf-8", "surrogatepass"), MOST_NESTING - _LEAST_LEFT)
        given = loads(arguments)
    except (ApiError, ValueError, RecursionError):
        return None
    return {} if given is None else given if isinstance(given, dict) else None


def _signature(thoughts: str) -> str:
    """Clients want one; nothing is made of it when it comes back."""
    return hashlib.blake2b(thoughts.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
