"""Server-sent events, and requests whose client may go away.

sse-starlette would do this too, but importing it replaces uvicorn's handler of SIGTERM and ends all running streams at
once, where this server lets them finish.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from saccade.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

T = TypeVar("T")


def encoded(data: Any) -> bytes:
    """JSON, whatever a client sent that is told again: half of a surrogate pair passes, escaped, and a number that is
    none becomes null."""
    try:
        return msgspec.json.encode(data)
    except (ValueError, OverflowError, TypeError):  # half a pair, or a number that no machine word holds
        return _encode(json.loads(json.dumps(data), parse_constant=lambda _: None)).encode()


class JSONAnswer(Response):
    """``encoded`` data as a response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


def event(data: Any) -> bytes:
    """One event of JSON."""
    return b"data: " + encoded(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + encoded(data) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """How a stream says that it failed: no status can be sent any more."""
    return event(error.body())


async def refuse(send: Send, error: ApiError, kind: str = "http", path: str = "") -> None:
    """An error as the whole answer to a request of ``path``; ``kind`` is ``websocket.http`` for a WebSocket that is not
    opened."""
    status, body = error.encoded(path)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": f"{kind}.response.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body})


class EventStream(Response):
    """Sends what ``body`` gives, each item as it comes. A client that does not read holds ``body`` up; one that goes
    away ends it. After ``ping`` seconds without an item ``sign`` says that the server lives. ``close`` is called at
    the end, even where ``body`` was never begun."""

    media_type = "text/event-stream"

    def __init__(
        self, body: AsyncGenerator[bytes, None], ping: float, close: Callable[[], None], sign: bytes = PING
    ) -> None:
        self.body_iterator, self._ping, self._close, self._sign = body, ping, close, sign
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        self.body = b""
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent = asyncio.get_running_loop().time()
        tasks = [asyncio.ensure_future(work) for work in (self._write(send), _gone(receive), self._pings(send))]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.body_iterator.aclose()
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self.body_iterator:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pings(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            wait = self._sent + self._ping - clock()
            if wait <= 0:
                self._sent = clock()
                await send({"type": "http.response.body", "body": self._sign, "more_body": True})
            await asyncio.sleep(max(wait, 0.01))


async def attend(request: Request, work: Awaitable[T]) -> T:
    """``work``, unless the client goes away: then it is cancelled, and ClientDisconnect is raised."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Until the client goes away. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
