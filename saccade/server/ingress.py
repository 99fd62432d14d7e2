"""In front of replicas: sends each request to the one that it belongs to, and keeps promises when that one breaks.

* Before the first byte of an answer another replica is tried.
* A stream that breaks ends with an error event, so that no client takes half an answer for a whole one.
* What is no stream is passed on once it is complete.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from saccade.server.bodies import Room, read_body
from saccade.server.errors import ApiError, is_anthropic
from saccade.server.events import DONE, error_event, named_event, refuse
from saccade.server.routing import ROUTE_HEADER, route_of

logger = logging.getLogger("saccade.server")
SMALL = 128 * 1024  # bytes of a body that are looked into on the event loop
ATTEMPTS = 4
PAUSE = 0.25  # seconds before the second attempt, and twice as many before each further one
_OWN_HEADERS = (b"connection", b"transfer-encoding", b"keep-alive", b"upgrade")  # of one connection alone
STREAMS = b"text/event-stream"
_NUMBER = re.compile(rb'"sequence_number":(\d+)')


@dataclass(frozen=True)
class Forwarded:
    """One request as a replica gets it."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: str = ""


@dataclass(frozen=True)
class Head:
    """How an answer begins."""

    status: int
    headers: list[tuple[bytes, bytes]]


Part = Head | bytes


class ReplicaLost(Exception):
    """The replica that was to answer is gone, or cannot be reached."""


class Replicas(Protocol):
    """What knows the replicas."""

    def send(self, request: Forwarded, route: str) -> AsyncIterator[Part]:
        """The answer of the replica that owns ``route``: its head, then its body as it comes. ReplicaLost where it
        breaks. Closing the iterator cancels the request."""
        ...


class Ingress:
    """An ASGI application over replicas. ``max_body``: most bytes of a request; ``probe_seconds``: how long ``/health``
    and ``/ready`` wait for a replica to answer before they say that there is none."""

    def __init__(self, replicas: Replicas, max_body: int = 32 * 2**20, probe_seconds: float = 5.0) -> None:
        self._replicas, self._max_body, self._probe_seconds = replicas, max_body, probe_seconds
        self._room = Room(16 * max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        if scope["type"] == "websocket":  # what a connection remembers would be one replica's
            said = "replicas answer over HTTP alone; ask a server of its own for a WebSocket"
            await refuse(send, ApiError(501, said, "not_supported"), "websocket.http")
            return
        if scope["type"] != "http":
            return
        share = self._room.share()
        try:
            await self._pass_on(scope, receive, send, await read_body(receive, self._max_body, share))
        except ApiError as error:
            await refuse(send, error, path=scope["path"])
        except ClientDisconnect:
            return
        finally:
            share.give_back()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        route = await _off_loop(len(body), lambda: route_of(scope["path"], dict(headers), body))
        kept = [pair for pair in headers if pair[0] not in (*_OWN_HEADERS, ROUTE_HEADER)]
        if not any(name == b"x-request-id" for name, _ in kept):
            kept.append((b"x-request-id", uuid4().hex.encode()))
        request = Forwarded(
            scope["method"],
            scope["path"],
            scope.get("query_string", b""),
            [*kept, (ROUTE_HEADER, route.encode())],
            body,
            (scope.get("client") or ("",))[0],
        )
        answer = asyncio.ensure_future(self._answer(request, route, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            limit = self._probe_seconds if scope["path"] in ("/health", "/ready") else None
            ended, _ = await asyncio.wait([answer, gone], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            elif not ended:
                answer.cancel()
                error = ApiError(503, "no replica is ready", "not_ready", headers={"retry-after": "1"})
                await refuse(send, error, path=scope["path"])
        finally:
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _answer(self, request: Forwarded, route: str, send: Send) -> None:
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
            if await _attempt(self._replicas.send(request, route), request, send):
                return
        error = ApiError(503, "no replica could answer; try again", "replica_lost", headers={"retry-after": "1"})
        await refuse(send, error, path=request.path)


async def _attempt(parts: AsyncIterator[Part], request: Forwarded, send: Send) -> bool:
    """Pass one replica's answer on. False where another one may be tried: nothing of it has been sent, and the replica
    is gone or is about to go."""
    head: Head | None = None
    begun, body, last = False, bytearray(), b""
    try:
        async for part in parts:
            if isinstance(part, Head):
                head = part
                if _streams(head):
                    continue  # its status is sent with its first event: until then another replica may be tried
            elif head is not None and _streams(head):
                if not begun:
                    await send(_start(head))
                    begun = True
                last = part
                await send({"type": "http.response.body", "body": part, "more_body": True})
            else:
                body += part
    except ReplicaLost as error:
        logger.warning("a replica is lost", extra={"fields": {"path": request.path, "why": str(error), "begun": begun}})
        if not begun:
            return False
        await send({"type": "http.response.body", "body": _broken(request.path, last), "more_body": False})
        return True
    finally:
        close = getattr(parts, "aclose", None)
        if close is not None:
            await close()
    if head is None:
        return False
    if not begun and head.status == 503 and _leaves(bytes(body)):
        return False
    if not begun:
        await send(_start(head))
    await send({"type": "http.response.body", "body": bytes(body), "more_body": False})
    return True


def _streams(head: Head) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(STREAMS) for name, value in head.headers)


def _leaves(body: bytes) -> bool:
    """Whether a 503 is of a replica that drains, or whose engine is gone: others may answer."""
    return b'"shutting_down"' in body or b'"engine_lost"' in body


def _broken(path: str, last: bytes) -> bytes:
    """How a stream that broke ends. ``last``: what was sent of it last."""
    error = ApiError(502, "the replica that was answering is gone; the answer is not complete", "replica_lost")
    begun = b"" if last.endswith(b"\n\n") else b"\n\n"
    if is_anthropic(path):
        return begun + named_event("error", error.for_path(path)[1])
    told = error_event(error)
    if path == "/v1/responses":  # Open Responses' clients look for a type
        numbers = [int(found) for found in _NUMBER.findall(last)]
        number = {"sequence_number": max(numbers, default=0) + 1}
        told = named_event("error", {"type": "error", **number, **error.body()["error"], **error.body()})
    return begun + told + DONE


def _start(head: Head) -> Message:
    headers = [(name, value) for name, value in head.headers if name.lower() not in _OWN_HEADERS]
    return {"type": "http.response.start", "status": head.status, "headers": headers}


async def _live(receive: Receive, send: Send) -> None:
    """Startup and shutdown, at which there is nothing to do."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _off_loop(size: int, work: Callable[[], str]) -> str:
    """``work`` on ``size`` bytes, on a thread where there are many."""
    if size <= SMALL:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
