"""How bodies are read: a prompt of a hundred thousand tokens must not hold up the streams of others for long."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from saccade.server.errors import ApiError


class Room:
    """Bytes of requests that are held at one time, at most ``most``: hundreds of clients may send a whole ``max_body``
    each at once. It lives on the event loop's thread alone."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0

    def share(self) -> Share:
        """What one request takes of it; nothing yet."""
        return Share(self)


class Share:
    """Bytes that one request holds."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.size = 0

    def take(self, size: int) -> None:
        """So many more; 503 where there is no room for them."""
        if self._room.used + size > self._room.most:
            raise ApiError(
                503,
                f"requests of {self._room.used} bytes are held already, and {self._room.most} is the most; try again",
                "overloaded",
                headers={"retry-after": "1"},
            )
        self.size += size
        self._room.used += size

    def give_back(self) -> None:
        """All of them. Twice does nothing."""
        self._room.used -= self.size
        self.size = 0


def too_large(most: int) -> ApiError:
    """The answer to a request of more bytes."""
    return ApiError(413, f"a request may have {most} bytes at most", "request_too_large")


async def read_body(receive: Receive, most: int, share: Share | None = None) -> bytes:
    """The whole body of a request, of at most ``most`` bytes: :func:`too_large` otherwise. ClientDisconnect where the
    client goes before its end. ``share``: takes its bytes as they come."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise too_large(most)
        if share is not None:
            share.take(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def decoded(raw: bytes) -> Any:
    """JSON, read by msgspec, several times faster than the standard library. What msgspec refuses the library reads, or
    refuses in its words: half of a surrogate pair, say, or NaN. ValueError or RecursionError for what is none."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(raw)


class JSONRequest(Request):
    """A request whose body :func:`decoded` reads."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            raw = await self.body()
            self._json = await self.app.state.serving.parse(len(raw), lambda: decoded(raw))
        return self._json


class JSONRoute(APIRoute):
    """A route of the application that gets a :class:`JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JSONRequest(request.scope, request.receive))

        return read
