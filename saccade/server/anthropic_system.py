"""System prompts whose first block changes from call to call.

Agents put a date, or a line for the accounting, before all that stays the same. Taken as it stands, nothing behind it
could be reused. So such a block is told behind the conversation: at the end of its last message that is not the
model's. What the model reads is the same, in another order.
"""

from __future__ import annotations

import hashlib
import json
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
MOST = 4096  # conversations that are remembered


class SystemHeads:
    """How the system prompts of conversations began. For any thread: large bodies are parsed beside the event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._lock = most, threading.Lock()
        self._seen: OrderedDict[bytes, tuple[bytes, bool]] = OrderedDict()

    def changes(self, owner: str, blocks: Sequence[str], messages: Sequence[JSON]) -> bool:
        """Whether the first of ``blocks`` is of the kind that changes: it is known by its name, or was another one in
        an earlier call of the same conversation, which is one of ``owner`` with the same other blocks and the same
        first message. Of one message alone it is not known whether it goes on."""
        if len(blocks) < 2:
            return False
        if blocks[0].startswith(BILLING):
            return True
        place, head = _digest(owner, *blocks[1:], _said(messages[0])), _digest(blocks[0])
        with self._lock:
            before, changed = self._seen.pop(place, (head, False))
            changed = changed or (before != head and len(messages) > 1)
            self._seen[place] = head, changed
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
