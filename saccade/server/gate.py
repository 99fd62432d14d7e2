"""What every request passes before it is routed: names, keys, limits of its size, and a line in the log after it."""

from __future__ import annotations

import asyncio
import re
import time
from uuid import uuid4

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.errors import shown
from saccade.server.admission import Caller, shutting_down
from saccade.server.bodies import Share, read_body, too_large
from saccade.server.errors import ApiError, is_anthropic
from saccade.server.events import refuse
from saccade.server.keys import Key
from saccade.server.logs import logger
from saccade.server.routing import ROUTE_HEADER, is_route
from saccade.server.serving import Serving
from saccade.server.settings import is_local
from saccade.server.shape import check_shape

OPEN = ("/health", "/ready", "/")  # for probes, which have no key, and the page that asks for one
TO_THE_END = (*OPEN, "/metrics")  # answered while the server ends, too
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Gate:
    """Wraps the application. Whatever it raises becomes an answer in the form that the path's clients know, without its
    traceback."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self.app, self.serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        caller = Caller(_request_id(headers), route=_route(headers))
        status, began, share = 0, time.perf_counter(), self.serving.room.share()

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_always(caller, scope["path"])]
            await send(message)

        scope.setdefault("state", {})["caller"] = caller
        tracing = self.serving.tracing
        if tracing is not None:
            caller.span = tracing.request(scope["method"], scope["path"], caller.request_id, headers)
        try:
            caller.key = self._admit(scope, headers)
            if self.serving.admission.draining and scope["path"] not in TO_THE_END:
                raise shutting_down()
            if scope["method"] == "POST":
                self.serving.admission.count(caller)
            receive = await self._body(scope, headers, receive, share)
            if scope["method"] == "POST":
                self.serving.admission.comes(caller)
            await self.app(scope, receive, reply)
        except ClientDisconnect:
            status = status or 499
        except ApiError as error:
            await refuse(reply, error, path=scope["path"])
        except Exception:
            logger.exception("a request failed", extra={"fields": {"request_id": caller.request_id}})
            if not status:
                await refuse(reply, ApiError(500, "the server failed to answer", "internal_error"), path=scope["path"])
        finally:
            share.give_back()
            self.serving.admission.came(caller)
            route = getattr(scope.get("route"), "path", "none")
            self.serving.answered(caller, (scope["method"], scope["path"], route), status, began)

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket, whose messages the route checks, counts and logs one by one; refused, counted and logged as a
        request is."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        caller = Caller(_request_id(headers))
        status, began = 0, time.perf_counter()

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_always(caller)]
            elif message["type"] in ("websocket.accept", "websocket.close") and not status:
                status = 101 if message["type"] == "websocket.accept" else 403  # what a server makes of it
            await send(message)

        scope.setdefault("state", {})["caller"] = caller
        try:
            self._same_origin(headers)
            caller.key = self._admit(scope, headers)
            if self.serving.admission.draining:
                raise shutting_down()
            await self.app(scope, receive, reply)
        except ApiError as error:
            await refuse(reply, error, "websocket.http")
        except Exception:
            status = status or 500
            logger.exception("a connection failed", extra={"fields": {"request_id": caller.request_id}})
        finally:
            if status != 101:
                route = getattr(scope.get("route"), "path", "none")
                self.serving.answered(caller, ("WEBSOCKET", scope["path"], route), status or 499, began)

    def _same_origin(self, headers: dict[bytes, bytes]) -> None:
        """403 for a page of another site: browsers let every page open a WebSocket to every server."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin not in self.serving.config.cors:
            host = headers.get(b"host", b"").decode("latin-1")
            if not host or origin.partition("://")[2] != host:
                raise ApiError(403, "pages of another origin may not ask; see --cors-origin", "bad_origin")

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> Key | None:
        """Who asks. 401 without a key that is known; 403 where a page of another name may be asking."""
        keys, path = self.serving.config.keys, scope["path"]
        if path in OPEN:
            return None
        if not keys:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if not is_local(name) and name not in self.serving.config.hosts:
                raise ApiError(403, "a server without API keys answers to localhost alone; see --host-name", "bad_host")
            return None
        if scope.get("method") == "OPTIONS" and self.serving.config.cors:
            return None  # a browser asks whether it may send the key
        scheme, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        secret = secret if scheme.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")
        key = keys.find(secret.strip())
        if key is None:
            said = "the API key is not known" if secret else "give an API key: authorization: Bearer KEY, or x-api-key"
            raise ApiError(401, said, "invalid_api_key", headers={"www-authenticate": "Bearer"})
        return key

    async def _body(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, share: Share) -> Receive:
        """A ``receive`` that gives the whole body at once, which is neither too long nor too deep, nor costs more than
        its length says."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return receive
        config = self.serving.config
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > config.max_body:
            raise too_large(config.max_body)
        try:
            async with asyncio.timeout(config.body_seconds):
                body = await read_body(receive, config.max_body, share)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {config.body_seconds:g} seconds", "request_timeout"
            ) from None
        if body:
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json" and not kind.endswith(b"+json"):
                given = f", not {shown(kind.decode('latin-1'), 60)}" if kind else ""
                raise ApiError(415, f"the content-type must be application/json{given}", "unsupported_media_type")
            packed = headers.get(b"content-encoding", b"").strip().lower()
            if packed not in (b"", b"identity"):
                given = shown(packed.decode("latin-1"), 60)
                message = f"content-encoding {given} is not unpacked; send the body as it is, without that header"
                raise ApiError(415, message, "unsupported_media_type")
            await self.serving.parse(len(body), lambda: check_shape(body, config.max_nesting))
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay


def _always(caller: Caller, path: str = "") -> list[tuple[bytes, bytes]]:
    """Headers of every answer."""
    number = caller.request_id.encode()
    theirs = [(b"request-id", number)] if is_anthropic(path) else []
    return [(b"x-request-id", number), *theirs, (b"x-content-type-options", b"nosniff")]


def _route(headers: dict[bytes, bytes]) -> str:
    given = headers.get(ROUTE_HEADER, b"").decode("latin-1")
    return given if is_route(given) else ""


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid4().hex
