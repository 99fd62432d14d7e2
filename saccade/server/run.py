"""Listens, and ends in order."""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
import sys
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from saccade.errors import EngineLost, SaccadeError
from saccade.server.app import make_app
from saccade.server.engines import EngineFace
from saccade.server.generation import GRACE
from saccade.server.logs import logger
from saccade.server.serving import Serving
from saccade.server.settings import ServerConfig

MOST_HEADER_BYTES = 65536
MOST_CHUNKS = 4096  # that one read may bring: each costs more than the bytes in it
SWITCH = 0.001  # seconds that a thread with a large body works before the event loop goes on; Python's is 0.005
SENDING = 2.0  # seconds, at least, in which what was said last may be sent
_ANSWER = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"


def serve(engine: EngineFace, config: ServerConfig) -> None:
    """Serve a model until a signal ends it. SIGTERM and Ctrl-C: take no more requests, let those that run end for at
    most ``drain_seconds``, tell the others' clients. A second Ctrl-C ends at once. The engine is closed then.
    EngineLost where it was lost, or hung, by then."""
    server = Server(Serving(engine, config))
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    gc.collect()
    gc.freeze()  # what was imported and made stays: a collection that walks over it would hold up every stream
    try:
        server.run()
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()  # or extension modules complain at the interpreter's end of what was never collected
    if server.lost is not None:
        raise EngineLost(f"this server ended without its engine: {server.lost}")


class Server(uvicorn.Server):
    """uvicorn, which drains as ``config`` says."""

    def __init__(self, serving: Serving) -> None:
        config = serving.config
        super().__init__(
            uvicorn.Config(
                make_app(serving),
                host=config.host,
                port=config.port,
                http=_protocol(config),
                ws=Draining,
                ws_max_size=config.max_body,
                ws_per_message_deflate=False,  # a small message could become a huge one
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                ssl_certfile=config.tls_certificate,
                ssl_keyfile=config.tls_key,
                ssl_ca_certs=None if config.tls_client_authorities is None else str(config.tls_client_authorities),
                ssl_cert_reqs=ssl.CERT_NONE if config.tls_client_authorities is None else ssl.CERT_REQUIRED,
            )
        )
        self.serving = serving
        self.lost: str | None = None  # why no engine was there at the end
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except SystemExit:  # what uvicorn makes of a port that is taken
            raise SaccadeError(
                f"cannot listen on {self.config.host} port {self.config.port}: it is in use or not allowed; "
                "give another --host or --port"
            ) from None
        address = self.address
        where = f"{'https' if self.config.is_ssl else 'http'}://{address[0]}:{address[1]}"
        logger.info("serving", extra={"fields": {"model": self.serving.names[0], "address": where}})

    async def shutdown(self, sockets: Any = None) -> None:
        self.serving.drain()  # whatever it is that ends the server
        left = await self._drained()
        engine = self.serving.engine
        self.lost = engine.trouble if engine.state in ("broken", "stuck") else None
        self.config.timeout_graceful_shutdown = max(SENDING, left)  # type: ignore[assignment]
        await super().shutdown(sockets)

    async def _drained(self) -> float:
        """Listen on, and answer that the server ends, until what runs has ended or was told that it must: the seconds
        that are left."""
        serving, clock = self.serving, asyncio.get_running_loop().time
        ends, told = clock() + serving.config.drain_seconds, False
        while (serving.admission.samples or serving.sockets) and not self.force_exit:
            if clock() > ends and not told:
                serving.end_all()
                told = True
            if clock() > ends + 2 * GRACE:  # the engine answers no one
                serving.engine.give_up(EngineLost("this server shut down before the engine answered"))
                break
            await asyncio.sleep(0.05)
        return ends - clock()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return host, port

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None and not self.should_exit:
            self._loop.call_soon_threadsafe(self._drain)
        super().handle_exit(sig, frame)
        # uvicorn raises the signals again once it has ended, so that its parent sees what ended it: draining is none.
        self._captured_signals = [one for one in self._captured_signals if one != signal.SIGTERM]

    def _drain(self) -> None:
        serving = self.serving
        serving.drain()
        fields = {"running": serving.admission.samples, "seconds": serving.config.drain_seconds}
        logger.info("shutting down", extra={"fields": fields})


MOST_FRAMES = 65536  # of one message


class Draining(WebSocketsSansIOProtocol):
    """WebSockets that the application closes when the server drains: uvicorn would cut their answers off. One that was
    refused with an answer is complete: uvicorn would log an error."""

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # as uvicorn says itself of one that was closed instead

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) >= MOST_FRAMES:  # empty ones count towards no size
            self.conn.fail(1009, "a message has too many frames")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
            return
        super().handle_cont(event)

    def shutdown(self) -> None:
        if not self.handshake_complete or self.close_sent:
            super().shutdown()


def _protocol(config: ServerConfig) -> type[HttpToolsProtocol]:
    """HTTP whose headers come in time and are not too long: uvicorn's own waits for ever, and reads without end."""

    class Guarded(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _read = 0  # bytes since the request began, while its headers come
        _headers = 0  # bytes of its address, its headers and its trailers
        _parts: list[bytes]  # of its body, since data came last
        _whole = True  # whether the last request has come to its end
        _skips = False  # whether it was answered before, and the rest of its body is passed over

        def connection_made(self, transport: Any) -> None:
            self._parts = []
            super().connection_made(transport)
            self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._timer is None and (self.cycle is None or self.cycle.response_complete):
                if self._whole:
                    self._await_headers()  # the next request of a connection that is kept alive
                else:
                    self._skip()
            if self._timer is not None and not self._skips:
                self._read += len(data)
            super().data_received(data)
            self._join()
            if self._timer is not None and not self._skips and self._read > MOST_HEADER_BYTES:
                self._refuse_headers()

        def on_message_begin(self) -> None:
            self._headers, self._whole = 0, False
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + 4)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._stop()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._parts.append(body)
            if len(self._parts) > MOST_CHUNKS:
                self._refuse(b"400 Bad Request", b"the chunks of the body are too small")
                raise ValueError("chunks are too small")  # the parser stops

        def on_message_complete(self) -> None:
            self._whole = True
            if self._skips:
                self._stop()
            self._join()
            super().on_message_complete()

        def _count(self, size: int) -> None:
            """So many bytes more of headers, or of the trailers that may follow a body in chunks. One read may hold
            them all and the body too, so it is counted here as well."""
            self._headers += size
            if self._headers > MOST_HEADER_BYTES:
                self._refuse_headers()
                raise ValueError("headers are too long")  # the parser stops

        def _join(self) -> None:
            """Hand over what came of the body, at once: uvicorn would copy all that waits for each chunk, and a
            chunk may be one byte."""
            if self._parts:
                body, self._parts = b"".join(self._parts), []
                super().on_body(body)

        def send_400_response(self, msg: str) -> None:
            self._refuse(b"400 Bad Request", b"this is no HTTP request")

        def _await_headers(self) -> None:
            self._read = 0
            self._timer = self.loop.call_later(config.header_seconds, self._late)

        def _late(self) -> None:
            self._timer = None
            if self._read:
                self._refuse(b"408 Request Timeout", b"headers did not come in time")
            else:
                self.transport.close()

        def _skip(self) -> None:
            """Read what a client still sends of a request that was refused: closed at once, it would not see why."""
            self._skips = True
            self._timer = self.loop.call_later(config.body_seconds, self.transport.close)

        def _stop(self) -> None:
            self._skips = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse_headers(self) -> None:
            self._refuse(b"431 Request Header Fields Too Large", b"headers are too long")

        def _refuse(self, status: bytes, said: bytes) -> None:
            self._stop()
            body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}' % said
            if not self.transport.is_closing():
                self.transport.write(_ANSWER % (status, len(body), body))
                self.transport.close()

    return Guarded
