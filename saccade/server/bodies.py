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


def too_large(most: int) -> ApiError:
    """The answer to a request of more bytes."""
    return ApiError(413, f"a request may have {most} bytes at most", "request_too_large")


async def read_body(receive: Receive, most: int) -> bytes:
    """The whole body of a request, of at most ``most`` bytes: :func:`too_large` otherwise. ClientDisconnect where the
    client goes before its end."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > most:
            raise too_large(most)
        if not message.get("more_body", False):
            return bytes(body)


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
            self._json = decoded(await self.body())
        return self._json


class JSONRoute(APIRoute):
    """A route of the application that gets a :class:`JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JSONRequest(request.scope, request.receive))

        return read
