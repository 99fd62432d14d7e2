"""How bodies are read: a prompt of a hundred thousand tokens must not hold up the streams of others for long."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class JSONRequest(Request):
    """A request whose body msgspec reads, several times faster than the standard library. What msgspec refuses the
    library reads, or refuses in its words: half of a surrogate pair, say, or NaN."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = msgspec.json.decode(await self.body())
            except (msgspec.DecodeError, UnicodeDecodeError):
                return await super().json()
        return self._json


class JSONRoute(APIRoute):
    """A route of the application that gets a :class:`JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JSONRequest(request.scope, request.receive))

        return read
