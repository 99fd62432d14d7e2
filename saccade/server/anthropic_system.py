"""System prompts whose first block changes from call to call.

Agents put a date, or a line for the accounting, before all that stays the same. Taken as it stands, nothing behind it
could be reused. So such a block is told behind the conversation: at the end of its last message that is not the
model's. What the model reads is the same, in another order.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

JSON = dict[str, Any]
NOTE = (
    "the first block of system changes from call to call: it was told at the end of the last message, so that what "
    "comes before it can be reused"
)
BILLING = "x-anthropic-billing-header:"  # what Claude Code begins its system prompt with; it changes at each call
LINE = 256  # letters of a date, or of another line of the moment, at most
MOST = 8192  # conversations and agents that are remembered
_DIGIT = re.compile(r"\d")


class SystemHeads:
    """How the system prompts of conversations began. For any thread: large bodies are parsed beside the event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._lock = most, threading.Lock()
        # Heads of conversations, and agents, which are known by the rest of their system prompts, whose heads change.
        self._seen: OrderedDict[bytes, bytes] = OrderedDict()

    def changes(self, owner: str, system: Sequence[JSON], heads: Sequence[str], messages: Sequence[JSON]) -> bool:
        """Whether the first block of ``system``, whose texts are ``heads``, is of the kind that changes. One is that

        * begins as ``BILLING`` does; or
        * is a short line with a digit and without a mark of a cache, before a block that has one; or
        * was another one in an earlier turn of a conversation: of ``owner``, with the same other blocks and the same
          first message; and from then on wherever these blocks come. Of one message alone it is not known whether the
          conversation goes on.
        """
        if len(heads) < 2:
            return False
        first, *rest = heads
        marks = [block.get("cache_control") is not None for block in system]
        line = len(first) <= LINE and _DIGIT.search(first) is not None
        if first.startswith(BILLING) or (line and any(marks) and not marks[0]):
            return True
        agent, head = _digest(owner, *rest), _digest(first)
        talk = _digest(agent.hex(), _said(messages[0]))
        with self._lock:
            changed = agent in self._seen or (self._seen.get(talk, head) != head and len(messages) > 1)
            place, value = (agent, b"") if changed else (talk, head)
            self._seen[place] = value
            self._seen.move_to_end(place)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return changed


def behind(messages: list[JSON], block: str) -> None:
    """Tell ``block`` at the end of the last of a chat's ``messages`` that is not the model's."""
    at = next((place for place in reversed(range(len(messages))) if messages[place]["role"] != "assistant"), None)
    told = f"<system>\n{block}\n</system>"
    if at is None:
        messages.insert(0, {"role": "user", "content": told})
        return
    content = messages[at]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    messages[at] = {**messages[at], "content": [*parts, {"type": "text", "text": told}]}


def _said(message: JSON) -> str:
    """The content of a message without marks of caches, which move from turn to turn."""
    content = message.get("content")
    if not isinstance(content, list):
        return json.dumps(content)
    return json.dumps([
        {name: value for name, value in block.items() if name != "cache_control"} if isinstance(block, dict) else block
        for block in content
    ])  # fmt: skip


def _digest(*parts: str) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()
