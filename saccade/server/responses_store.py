"""Responses that later ones may go on from. Each key has its own."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from saccade.errors import shown
from saccade.server.admission import Caller
from saccade.server.errors import ApiError
from saccade.server.weight import weight

JSON = dict[str, Any]
MOST_CHARACTERS = 256 * 2**20


@dataclass(frozen=True)
class Stored:
    """``input``: the items that it was asked with. ``messages``: the conversation up to its answer, this included."""

    response: JSON
    input: list[JSON]
    messages: list[JSON]
    size: int


class ResponseStore:
    """In memory: at most ``most`` responses, and 256 Mi characters of all that they hold; the oldest go first. Nothing
    is left when the server ends."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, caller: Caller, response: JSON, given: list[JSON], messages: list[JSON]) -> None:
        """Keep a response under its id."""
        size = weight([response, given, messages])
        self._stored[caller.name, response["id"]] = Stored(response, given, messages, size)
        self._size += size
        while self._stored and (len(self._stored) > self._most or self._size > MOST_CHARACTERS):
            self._size -= self._stored.popitem(last=False)[1].size

    def get(self, caller: Caller, response_id: str, param: str | None = None) -> Stored:
        """404 for one that this caller has not, or has no longer."""
        stored = self._stored.get((caller.name, response_id))
        if stored is None:
            raise ApiError(
                404,
                f"there is no response {shown(response_id, 80)}; it was not stored, or too many came after it",
                "previous_response_not_found" if param else "response_not_found",
                param,
            )
        return stored

    def forget(self, caller: Caller, response_id: str) -> None:
        """404 as in :meth:`get`."""
        self._size -= self.get(caller, response_id).size
        del self._stored[caller.name, response_id]
