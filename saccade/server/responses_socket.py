"""``/v1/responses`` over a WebSocket: one turn after the other, whose conversation the connection remembers (Open
Responses)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected, WebSocketState

from saccade.errors import SaccadeError, shown
from saccade.server.admission import Caller
from saccade.server.bodies import decoded
from saccade.server.errors import ApiError, bad_request, from_saccade, from_validation
from saccade.server.events import encoded
from saccade.server.generation import Generation
from saccade.server.logs import logger
from saccade.server.responses import Responses
from saccade.server.responses_protocol import ResponsesRequest
from saccade.server.serving import Serving
from saccade.server.shape import check_shape

JSON = dict[str, Any]
ROUTE = "/v1/responses"
SECONDS = 3600.0  # of a connection, as Open Responses has it
MOST_WAITING = 16  # messages behind the one that is answered
_OVER_HTTP = ("stream", "stream_options", "background")  # fields that a message must not have
_GOING = 1012  # RFC 6455's registry: the service restarts
_GONE = (WebSocketDisconnect, WebSocketDisconnected)  # what sending to a client that left raises


@dataclass(frozen=True)
class _Last:
    """The newest response of a connection, from which the next may go on though it is stored nowhere."""

    id: str
    said: list[JSON]


class ResponsesSocket:
    """One connection. Turns are answered in the order in which they came; one that the client left is cancelled."""

    def __init__(self, serving: Serving, socket: WebSocket) -> None:
        self.serving, self.socket = serving, socket
        self.opener: Caller = socket.state.caller
        self._session = socket.headers.get("x-session-id")
        self._last: _Last | None = None
        self._waiting: deque[bytes] = deque()
        self._busy = False  # whether a turn runs; else the first of those that wait is about to
        self._news = asyncio.Event()
        self._share = serving.room.share()

    async def run(self) -> None:
        """Until the client goes away, the server ends, or the connection has lasted for an hour."""
        await self.socket.accept()
        self.serving.sockets.add(self)
        reading = asyncio.ensure_future(self._read())
        answering = asyncio.ensure_future(self._answer())
        try:
            await asyncio.wait([reading, answering], timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and not answering.done():
                said = f"a connection lasts {SECONDS:g} seconds at most; open another one"
                await self._tell(ApiError(400, said, "websocket_connection_limit_reached"))
        finally:
            self.serving.sockets.discard(self)
            self._share.give_back()
            for task in (reading, answering):
                task.cancel()
            await asyncio.gather(reading, answering, return_exceptions=True)
            if self.socket.application_state is WebSocketState.CONNECTED:
                with contextlib.suppress(*_GONE):
                    await self.socket.close(_GOING if self.serving.admission.draining else 1000)

    def drain(self) -> None:
        """Close once the turn that runs has its answer."""
        self._news.set()

    async def _read(self) -> None:
        """Queue what comes, until the client goes away."""
        while True:
            message = await self.socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            given = message.get("text")
            data = message.get("bytes") or b"" if given is None else given.encode("utf-8", "surrogatepass")
            held = sum(map(len, self._waiting)) + len(data)
            behind = len(self._waiting) - (not self._busy)
            if behind >= MOST_WAITING or held > self.serving.config.max_body:
                said = f"{max(0, behind)} messages wait already; send the next once a response has ended"
                await self._tell(ApiError(429, said, "rate_limit_exceeded"))
                continue
            try:
                self._share.take(len(data))
            except ApiError as error:
                await self._tell(error)
                continue
            self._waiting.append(data)
            self._news.set()

    async def _answer(self) -> None:
        """Answer what is queued, one at a time."""
        while not self.serving.admission.draining or self._waiting:
            while self._waiting:
                self._busy = True
                await self._turn(self._waiting.popleft())
            self._busy = False
            self._share.give_back()
            self._news.clear()
            if not self.serving.admission.draining:
                await self._news.wait()

    async def _turn(self, data: bytes) -> None:
        caller = replace(self.opener, request_id=uuid4().hex, costs={}, span=None)
        tracing, began, status = self.serving.tracing, time.perf_counter(), 200
        if tracing is not None:
            caller.span = tracing.request("WEBSOCKET", ROUTE, caller.request_id, {})
        earlier: str | None = None
        try:
            body = await self._body(data)
            earlier = body.previous_response_id
            self.serving.admission.count(caller)
            await self._respond(caller, body, len(data))
        except Exception as failure:
            error = _told(failure, caller)
            status = error.status
            if earlier is not None and self._last is not None and self._last.id == earlier:
                self._last = None  # the conversation ends with what failed: Open Responses wants it forgotten
            await self._tell(error)
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            self.serving.answered(caller, ("WEBSOCKET", ROUTE, ROUTE), status, began)

    async def _body(self, raw: bytes) -> ResponsesRequest:
        """What a message asks for. ApiError where it is none."""
        parse, most = self.serving.parse, self.serving.config.max_nesting
        await parse(len(raw), lambda: check_shape(raw, most))
        try:
            given = await parse(len(raw), lambda: decoded(raw))
        except (ValueError, RecursionError) as error:
            raise bad_request("the message is not valid JSON", code="invalid_json") from error
        kind = given.pop("type", None) if isinstance(given, dict) else None
        if kind != "response.create":
            raise bad_request(
                f"a message must be an object of type response.create, not {shown(kind, 60)}", "type", "invalid_type"
            )
        for name in _OVER_HTTP:
            if given.get(name) is not None:
                raise bad_request(f"{name} is for requests over HTTP; leave it out", name, "unsupported_field")
        try:
            body = ResponsesRequest.model_validate({**given, "stream": True})
        except ValidationError as error:
            raise from_validation(error.errors()) from error
        if self._session is not None and body.session_id is None:
            body.session_id = self._session
        if self.serving.config.log_prompts:
            logger.info("asked", extra={"fields": {"body": body.model_dump()}})
        return body

    async def _respond(self, caller: Caller, body: ResponsesRequest, size: int) -> None:
        last, earlier = self._last, body.previous_response_id
        before = last.said if last is not None and last.id == earlier else None
        job = await self.serving.parse(
            size, lambda: Responses(self.serving, caller, body, before, lambda kind, data: encoded(data))
        )
        generation = await Generation(self.serving, caller, await job.ask()).start()
        async with aclosing(job.told(generation, [])) as told:
            async for events in told:
                for one in events:
                    await self.socket.send_text(one.decode())
        self._last = _Last(job.id, job.said)

    async def _tell(self, error: ApiError) -> None:
        """A failure, in the form that Open Responses has for it."""
        said = error.body()["error"]
        said["code"] = said["code"] or said["type"]
        with contextlib.suppress(*_GONE):
            await self.socket.send_text(json.dumps({"type": "error", "status": error.status, "error": said}))


def _told(failure: Exception, caller: Caller) -> ApiError:
    if isinstance(failure, ApiError):
        return failure
    if isinstance(failure, SaccadeError):
        return from_saccade(failure)
    if isinstance(failure, _GONE):
        return ApiError(499, "the client has gone", "cancelled")
    logger.error("a turn failed", exc_info=failure, extra={"fields": {"request_id": caller.request_id}})
    return ApiError(500, "the server failed to answer", "internal_error")
