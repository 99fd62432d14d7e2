"""The HTTP side of an engine in a process of its own: starts it, talks to it, and sees when it is gone."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from saccade.engine.config import EngineConfig
from saccade.engine.messages import AddRequest, EngineStatistics
from saccade.engine.stream import AsyncOutputs, Stream
from saccade.errors import EngineLost, SaccadeError
from saccade.methods.policy import Policy
from saccade.models.tokenizer import load_tokenizer
from saccade.server import wire, wire_forms

logger = logging.getLogger("saccade.server")
POLICIES = 1024  # whose checks are remembered
PROGRAM = (sys.executable, "-m", "saccade.server.engine_process")  # what runs the engine
CLOSING = 120.0  # seconds that an engine may take to end: it stores what sessions have said last


class EngineProcess(asyncio.Protocol):
    """An engine in a process of its own (an EngineFace). The constructor returns when the model is loaded; it raises
    what loading raises. ``kv_events``: the arguments of KVEvents, None for none.

    Where the process ends by itself, everything that was asked of it fails with EngineLost and nothing can be asked any
    more. It is not started again: sessions and stored prefixes are gone, and what killed it may do so again. Whoever
    runs servers starts a new one.
    """

    def __init__(
        self, config: EngineConfig, log_level: str = "info", kv_events: dict[str, str | None] | None = None
    ) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._frames = wire.Frames()
        try:
            start = json.dumps(
                {"config": wire_forms.config_dict(config), "log_level": log_level, "kv_events": kv_events}
            ).encode()
            self._socket.sendall(len(start).to_bytes(4, "little") + start)
            ready = self._first()
        except BaseException:
            self._kill()
            raise
        self.about, self.note = wire_forms.about_of(ready.about), ready.note
        self.tokenizer = load_tokenizer(self.about.path)
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None
        self._closing = False
        assert ready.statistics is not None
        self._statistics = ready.statistics
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._asked: dict[int, tuple[Stream, list[int], AsyncOutputs]] = {}  # by request id, with its prompt
        self._checked: OrderedDict[str, SaccadeError | None] = OrderedDict()

    @property
    def alive(self) -> bool:
        return self._lost is None and not self._closing and self.process.poll() is None

    async def start(self) -> None:
        self._socket.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self, self._socket)

    async def check_policy(self, policy: Policy) -> None:
        text = policy.text
        if text not in self._checked:
            error = None
            try:
                await self._call(wire.CheckPolicy(0, text))
            except EngineLost:
                raise
            except SaccadeError as refused:
                error = refused
            self._checked[text] = error
            while len(self._checked) > POLICIES:
                self._checked.popitem(last=False)
        else:
            self._checked.move_to_end(text)
        if (known := self._checked[text]) is not None:
            raise type(known)(str(known))

    async def submit(self, messages: Sequence[AddRequest], coming: int = 0) -> AsyncOutputs:
        outputs = AsyncOutputs([one.request_id for one in messages], self._cancel, threads=False)
        frame = wire.Add(0, [wire_forms.request(one) for one in messages], coming)
        for message, stream in zip(messages, outputs.streams):
            self._asked[message.request_id] = stream, message.prompt, outputs
        try:
            await self._call(frame)
        except BaseException as error:
            for message in messages:
                self._asked.pop(message.request_id, None)
            if isinstance(error, asyncio.CancelledError):
                self._send(wire.Withdraw(frame.call))
                self._cancel([message.request_id for message in messages])
            raise
        return outputs

    async def open_session(self, name: str, owner: str, held: int | None = None) -> int:
        session: int = await self._call(wire.OpenSession(0, held, wire_forms.encoded(name), wire_forms.encoded(owner)))
        return session

    def save_soon(self, session: int, name: str, owner: str) -> None:
        self._send(wire.SaveSession(0, session, wire_forms.encoded(name), wire_forms.encoded(owner)))

    def leave(self, session: int, name: str, owner: str) -> None:
        self._send(wire.LeaveSession(0, session, wire_forms.encoded(name), wire_forms.encoded(owner)))

    async def forget(self, session: int | None, name: str, owner: str) -> bool:
        return bool(
            await self._call(wire.ForgetSession(0, session, wire_forms.encoded(name), wire_forms.encoded(owner)))
        )

    async def clear_prefixes(self) -> None:
        await self._call(wire.ClearPrefixes())

    async def running_reports(self, most: int) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = await self._call(wire.ReportRunning(0, most))
        return reports

    def statistics(self) -> EngineStatistics:
        return self._statistics

    def close(self) -> None:
        self._closing = True
        try:
            if self.process.poll() is None:
                # The transport writes later, if at all: the event loop may be at its end.
                self._socket_now().sendall(wire.framed(wire.Close()))
            self.process.wait(CLOSING)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._kill()

    # What comes from the engine, on the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for content in self._frames.feed(data):
            frame = wire.from_engine(content)
            if isinstance(frame, wire.Outputs):
                self._take(frame)
            elif isinstance(frame, wire.Reply):
                self._replied(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing:
            why = "this engine was closed"
        else:
            why = f"the engine's process ended by itself ({_how(self.process)})"
            logger.error("the engine is gone", extra={"fields": {"why": why}})
        self._lost = why
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineLost(why))
        for _, _, outputs in self._asked.values():
            outputs.lose(why)
        self._calls.clear()
        self._asked.clear()

    def _take(self, frame: wire.Outputs) -> None:
        if frame.statistics is not None:
            self._statistics = frame.statistics
        for output in frame.outputs:
            known = self._asked.get(output.request_id)
            if known is not None:
                known[0].put(wire_forms.step_output(output, known[1]))
                if output.outcome is not None:
                    del self._asked[output.request_id]

    def _replied(self, frame: wire.Reply) -> None:
        call = self._calls.pop(frame.call, None)
        if call is None or call.done():
            return
        if frame.error is None:
            call.set_result(frame.value)
        else:
            call.set_exception(wire_forms.raised(frame.error))

    # What goes to it.

    async def _call(self, frame: wire.Frame) -> Any:
        """Send a frame and wait for its reply."""
        if self._lost is not None or self._transport is None:
            raise EngineLost(self._lost or "this engine has not been started")
        self._number += 1
        frame.call = self._number
        reply = self._calls[frame.call] = asyncio.get_running_loop().create_future()
        try:
            self._send(frame)
            return await reply
        finally:
            self._calls.pop(frame.call, None)

    def _send(self, frame: wire.Frame) -> None:
        if self._transport is not None and self._lost is None:
            self._transport.write(wire.framed(frame))

    def _cancel(self, request_ids: Sequence[int]) -> None:
        self._send(wire.Cancel(0, list(request_ids)))

    def _first(self) -> wire.Ready:
        """The engine's first frame, however long its model takes to load."""
        while data := self._socket.recv(1 << 16):
            for content in self._frames.feed(data):
                frame = wire.from_engine(content)
                if isinstance(frame, wire.Ready):
                    return frame
                if isinstance(frame, wire.Reply) and frame.error is not None:
                    raise wire_forms.raised(frame.error)
        raise EngineLost(f"the engine's process ended before its model was loaded ({_how(self.process)})")

    def _socket_now(self) -> socket.socket:
        self._socket.setblocking(True)
        return self._socket

    def _kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        transport: asyncio.Transport | None = getattr(self, "_transport", None)
        with suppress(RuntimeError):  # the event loop may be closed
            if transport is not None:
                transport.abort()
                return
        self._socket.close()


def _how(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, which it is about to if it has not."""
    try:
        code = process.wait(2)
    except subprocess.TimeoutExpired:
        return "its socket closed"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
