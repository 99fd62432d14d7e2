"""The order that events of a streamed response must have, written from the specification of Open Responses, and each
event's form as openai-python types it, nothing missing and nothing of a wrong type.

Its public compliance run is not part of this: see docs/server.md.
"""

from __future__ import annotations

from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

JSON = dict[str, Any]

_FIELDS = """id object created_at completed_at status incomplete_details model previous_response_id instructions output
    error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key"""
RESOURCE = set(_FIELDS.split())  # every field of the resource, none of which may be left out
TERMINAL = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def typed(event: JSON) -> None:
    """AssertionError, or pydantic's error, for an event that is not one of openai-python's, or lacks a field of it."""
    found = _EVENT.validate_python(event)
    assert found.type == event["type"], event
    if "response" in event:  # what is optional to the client is required by the specification
        assert set(event["response"]) >= RESOURCE, RESOURCE - set(event["response"])


class Order:
    """Follows a stream: :meth:`feed` each event, then :meth:`end`."""

    def __init__(self) -> None:
        self.number = 0
        self.output: list[JSON] = []
        self.state = "new"
        self.item: JSON | None = None
        self.part: JSON | None = None
        self.text = ""
        self.whole: str | None = None  # what a .done event said of the open part, or call
        self.final: JSON | None = None

    def feed(self, event: JSON) -> None:
        typed(event)
        kind = event["type"]
        assert event["sequence_number"] == self.number, f"{kind} has another number than {self.number}"
        self.number += 1
        assert self.state != "ended", f"{kind} after the end"
        if kind in ("response.created", "response.in_progress"):
            assert self.state == {"response.created": "new", "response.in_progress": "created"}[kind]
            assert event["response"]["status"] == "in_progress"
            assert event["response"]["output"] == []
            self.state = kind.removeprefix("response.")
            return
        assert self.state == "in_progress", f"{kind} before response.in_progress"
        if kind in TERMINAL:
            assert self.item is None, f"{kind} while an item is open"
            self.final = event["response"]
            assert self.final["status"] == TERMINAL[kind]
            assert self.final["output"] == self.output, "the response has other items than were told"
            self.state = "ended"
        elif kind == "error":
            self.state = "ended"
        else:
            self._item(kind.removeprefix("response."), event)

    def _item(self, kind: str, event: JSON) -> None:
        assert event["output_index"] == len(self.output), f"{kind} of another item than the open one"
        if kind == "output_item.added":
            assert self.item is None, "an item within an item"
            self.item, self.text, self.whole = event["item"], "", None
            assert self.item["status"] == "in_progress"
            assert not self.item.get("content"), "an item begins empty"
            return
        assert self.item is not None, f"{kind} without an item"
        if kind == "output_item.done":
            assert self.part is None, "an item ends while a part of it is open"
            done = event["item"]
            assert (done["id"], done["type"]) == (self.item["id"], self.item["type"])
            assert done["status"] in ("completed", "incomplete")
            said = done["arguments"] if done["type"] == "function_call" else done["content"][0]["text"]
            assert said == self.whole, "an item has another text than its events"
            self.output.append(done)
            self.item = None
            return
        assert event["item_id"] == self.item["id"]
        if self.item["type"] == "function_call":
            self._text(kind, event, "function_call_arguments", "arguments")
            return
        name = PARTS[self.item["type"]]
        assert event["content_index"] == 0
        if kind == "content_part.added":
            assert self.part is None, "a part within a part"
            self.part = event["part"]
            assert (self.part["type"], self.part["text"]) == (name, "")
        elif kind == "content_part.done":
            assert self.part is not None
            assert self.whole is not None, "a part ends before its text"
            assert (event["part"]["type"], event["part"]["text"]) == (name, self.whole)
            self.part = None
        else:
            assert self.part is not None, f"{kind} without a part"
            self._text(kind, event, name, "text")

    def _text(self, kind: str, event: JSON, name: str, field: str) -> None:
        assert self.whole is None, f"{kind} after its end"
        if kind == f"{name}.delta":
            assert event["delta"], "a delta that says nothing"
            self.text += event["delta"]
        else:
            assert kind == f"{name}.done", kind
            assert event[field] == self.text, "a text differs from its deltas"
            self.whole = event[field]

    def end(self) -> JSON:
        """The response, once the stream has ended."""
        assert self.state == "ended", "the stream ended without its last event"
        assert self.final is not None, "the stream ended with an error"
        return self.final


def follow(events: list[Any]) -> JSON:
    """The response that a stream of events tells, ``[DONE]`` last."""
    assert events[-1] == "[DONE]"
    order = Order()
    for event in events[:-1]:
        order.feed(event)
    return order.end()
