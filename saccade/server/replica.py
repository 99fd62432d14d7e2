"""One replica: the whole server but its socket. Requests come as data, and answers leave as parts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message

from saccade.errors import SaccadeError
from saccade.server.app import make_app
from saccade.server.engines import EngineFace
from saccade.server.ingress import Forwarded, Head, Part
from saccade.server.serving import Serving
from saccade.server.settings import ServerConfig

MOST_PENDING = 1 << 20  # bytes that an answer may be ahead of its reader


class Replica:
    """Answers one request after the other as :class:`Server` does over HTTP."""

    def __init__(self, engine: EngineFace, config: ServerConfig) -> None:
        self.serving = Serving(engine, config)
        self._app = make_app(self.serving)

    async def start(self) -> None:
        """On the event loop that answers."""
        await self.serving.engine.start()

    def check(self) -> None:
        """SaccadeError once the engine has ended, and while it hangs."""
        if not self.serving.engine.alive:
            raise SaccadeError(f"this replica cannot answer: {self.serving.engine.trouble}")

    def close(self) -> None:
        """End what still runs, and the engine."""
        self.serving.drain()
        self.serving.end_all()
        self.serving.close()

    async def answer(self, request: Forwarded) -> AsyncIterator[Part]:
        """A Head, then the body. What came while the reader was busy is one part. Closing it cancels the request."""
        pipe = _Pipe(request.body)
        path, _, host = request.path, None, request.client
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("utf-8", "surrogatepass"),
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": (host, 0),
            "server": ("replica", 0),
        }
        work = asyncio.ensure_future(self._app(scope, pipe.receive, pipe.send))
        work.add_done_callback(lambda _: pipe.end())
        try:
            async for part in pipe.parts():
                yield part
            work.result()
        finally:
            pipe.leave()
            if not work.done():
                await asyncio.wait([work], timeout=1)
                work.cancel()
            await asyncio.gather(work, return_exceptions=True)


class _Pipe:
    """Between the application and the reader of its answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._ready: deque[Part] = deque()
        self._pending = 0
        self._arrived, self._room, self._gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._ended = False
        self._room.set()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._ready.append(Head(message["status"], [(bytes(k), bytes(v)) for k, v in message["headers"]]))
        elif body := message.get("body", b""):
            self._ready.append(body)
            self._pending += len(body)
            if self._pending > MOST_PENDING:
                self._room.clear()
        self._arrived.set()
        await self._room.wait()

    def end(self) -> None:
        self._ended = True
        self._arrived.set()

    def leave(self) -> None:
        """The reader has gone."""
        self._gone.set()
        self._room.set()

    async def parts(self) -> AsyncIterator[Part]:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            ready, self._ready, self._pending = self._ready, deque(), 0
            self._room.set()
            while ready and isinstance(ready[0], Head):
                yield ready.popleft()
            if ready:
                yield b"".join(one for one in ready if isinstance(one, bytes))
            if self._ended and not self._ready:
                return
