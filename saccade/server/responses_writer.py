"""The output items of a response, and the events that tell of them, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade.server.events import named_event
from saccade.server.reader import Delta
from saccade.server.responses_items import call_item, message_item, reasoning_item, text_part
from saccade.server.tool_formats.parts import Arguments, Begun, Ended

JSON = dict[str, Any]


class Writer:
    """``output``: the items that are complete. One item at most is open: thoughts, a message, or a call. ``frame``: how
    an event of a kind is sent. ``shown``: whether thoughts are told; ``thoughts`` has them anyway."""

    def __init__(self, frame: Callable[[str, JSON], bytes] = named_event, shown: bool = True) -> None:
        self._frame, self._shown = frame, shown
        self.output: list[JSON] = []
        self._thoughts: list[str] = []
        self._number = 0
        self._open: JSON | None = None
        self._text: list[str] = []  # of the open item, piece by piece: text that grows would be copied at each
        self._scores: list[JSON] = []

    @property
    def thoughts(self) -> str:
        """All of them."""
        return "".join(self._thoughts)

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event, numbered."""
        self._number += 1
        return self._frame(kind, {"type": kind, "sequence_number": self._number - 1, **fields})

    def feed(self, delta: Delta, scores: list[JSON]) -> list[bytes]:
        """Take over what is new; the events that say so. ``scores``: log-probabilities of its tokens."""
        events: list[bytes] = []
        if delta.thoughts:
            self._thoughts.append(delta.thoughts)
        if delta.thoughts and self._shown:
            events += self._begin("reasoning")
            self._text.append(delta.thoughts)
            events.append(self.event("response.reasoning_text.delta", delta=delta.thoughts, **self._place()))
        for part in delta.parts:
            if isinstance(part, Begun):
                events += self._close("completed")
                events += self._begin_call(part)
            elif isinstance(part, Arguments):
                self._text.append(part.text)
                place = self._place(call=True)
                events.append(self.event("response.function_call_arguments.delta", delta=part.text, **place))
            elif not isinstance(part, str):
                events += self._end_call("completed" if isinstance(part, Ended) else "incomplete")
            elif part:
                events += self._begin("message")
                self._text.append(part)
                self._scores += scores
                events.append(self.event("response.output_text.delta", delta=part, logprobs=scores, **self._place()))
                scores = []
        if self._open is not None and self._open["type"] == "message":
            self._scores += scores
        return events

    def end(self, status: str) -> list[bytes]:
        """Close what is open. An answer that said nothing is an empty message."""
        events = self._begin("message") if not self.output and self._open is None else []
        return events + self._close(status)

    def _place(self, call: bool = False) -> JSON:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.output)}
        return place if call else {**place, "content_index": 0}

    def _begin(self, kind: str) -> list[bytes]:
        """Open an item of that kind, unless it is."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close("completed")
        self._text, self._scores = [], []
        self._open = message_item("in_progress", []) if kind == "message" else reasoning_item("in_progress", "")
        part = text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        events.append(self.event("response.output_item.added", output_index=len(self.output), item=self._open))
        events.append(self.event("response.content_part.added", part=part, **self._place()))
        return events

    def _close(self, status: str) -> list[bytes]:
        item = self._open
        if item is None:
            return []
        if item["type"] == "function_call":
            return self._end_call(status)
        place, text = self._place(), "".join(self._text)
        if item["type"] == "message":
            part = text_part(text, self._scores)
            done = message_item(status, [part], item["id"])
            events = [self.event("response.output_text.done", text=text, logprobs=self._scores, **place)]
        else:
            part = {"type": "reasoning_text", "text": text}
            done = reasoning_item(status, text, item["id"])
            events = [self.event("response.reasoning_text.done", text=text, **place)]
        events.append(self.event("response.content_part.done", part=part, **place))
        events.append(self.event("response.output_item.done", output_index=len(self.output), item=done))
        self.output.append(done)
        self._open = None
        return events

    def _begin_call(self, call: Begun) -> list[bytes]:
        self._text, self._open = [], call_item(call, "in_progress", "")
        return [self.event("response.output_item.added", output_index=len(self.output), item=self._open)]

    def _end_call(self, status: str) -> list[bytes]:
        """Close the call that is open, if one is."""
        item = self._open
        if item is None or item["type"] != "function_call":
            return []
        index, arguments = len(self.output), "".join(self._text)
        done = {**item, "status": status, "arguments": arguments}
        place, name = self._place(call=True), item["name"]
        self.output.append(done)
        self._open = None
        return [
            self.event("response.function_call_arguments.done", name=name, arguments=arguments, **place),
            self.event("response.output_item.done", output_index=index, item=done),
        ]
