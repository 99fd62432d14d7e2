"""The HTTP side of an engine in a process of its own: starts it, talks to it, and sees when it is gone."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from saccade.engine.messages import AddRequest, EngineStatistics
from saccade.engine.settings.config import EngineConfig
from saccade.engine.stream import AsyncOutputs
from saccade.errors import EngineLost, EngineStuck, SaccadeError
from saccade.methods.policy import Policy
from saccade.models.tokenizer import Tokenizer, load_tokenizer
from saccade.server import wire, wire_forms
from saccade.server.engine_calls import EngineCalls
from saccade.server.engine_launch import Launched, how, launch
from saccade.server.engine_watch import STEP_LIMIT, EngineWatch, Starts, look_after, processor_seconds
from saccade.server.matchers import Compiler

logger = logging.getLogger("saccade.server")
POLICIES = 1024  # whose checks are remembered
CLOSING = 120.0  # seconds that an engine may take to end: it stores what sessions have said last
SILENT = 2.0  # seconds without a sign of life after which one that is to end is killed


class EngineProcess(asyncio.Protocol):
    """An engine in a process of its own (an EngineFace). The constructor returns when the model is loaded; it raises
    what loading raises. ``kv_events``: the arguments of KVEvents, None for none. ``limit``: see EngineWatch;
    ``policies``: ``warming``.

    Where the process ends by itself, or hangs, everything that was asked of it fails with EngineLost. One that hangs
    may get on again, and then takes requests again. With ``restart`` a process that ended or hangs is started anew, its
    weights loaded again: sessions that are stored come back, other ones and prefixes are gone. Without it a lost engine
    stays lost: what killed it may do so again, and what runs the server starts a new one.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_level: str = "info",
        kv_events: dict[str, str | None] | None = None,
        limit: float = STEP_LIMIT,
        restart: bool = False,
        policies: Sequence[Policy] = (),
    ) -> None:
        self._watch = EngineWatch(limit, lambda: processor_seconds(self.process.pid))
        settings: dict[str, Any] = {
            "config": wire_forms.config_dict(config),
            "log_level": log_level,
            "kv_events": kv_events,
        }
        settings |= {"warm": [one.text for one in policies]}
        self._launch = partial(launch, settings | {"beat": self._watch.every}, self._began, self._loaded)
        self._starts = Starts() if restart else None
        self._tasks: set[asyncio.Future[None]] = set()
        self._closing = False
        self.epoch = 0
        self.tokenizer = Tokenizer(None)  # until a model is loaded
        self._take_over(self._launch())
        self.about, self.note = wire_forms.about_of(self._ready.about), self._ready.note
        self.compiler = Compiler(self.tokenizer.hf, self.about.limits.vocab_size, self.about.eos_token_ids)
        self._calls = EngineCalls(self._send, self._unable)
        self._checked: OrderedDict[str, SaccadeError | None] = OrderedDict()

    def _began(self, process: subprocess.Popen[bytes]) -> None:
        """A process has been started, whose model is not loaded yet."""
        self.process = process
        if self._closing:
            process.kill()

    def _loaded(self, path: Path) -> None:
        """Its model is loaded; its tokenizer is the one that this process has read where it was started anew."""
        if not self.tokenizer.available:
            self.tokenizer = load_tokenizer(path)

    def _take_over(self, launched: Launched) -> None:
        """Go on with this process."""
        self._socket, self._frames, self._ready = launched.socket, launched.frames, launched.ready
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None
        self._stuck: str | None = None
        self._gone: str | None = None  # what the process said of its end
        self._starting = False
        assert launched.ready.statistics is not None
        self._statistics = launched.ready.statistics

    @property
    def alive(self) -> bool:
        return self.state == "ok"

    @property
    def state(self) -> str:
        if self._starting and not self._closing:
            return "starting"
        if self._lost is not None or self._closing or self.process.poll() is not None:
            return "broken"
        return "ok" if self._stuck is None else "stuck"

    @property
    def trouble(self) -> str | None:
        if self.state == "ok":
            return None
        return self._lost or self._stuck or "the engine's process has ended"

    async def start(self) -> None:
        await self._connect()
        self._keep(look_after(self._look, self._watch.every))

    async def _connect(self) -> None:
        self._socket.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self, self._socket)
        self._watch.begin()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def check_policy(self, policy: Policy) -> None:
        text = policy.text
        if text not in self._checked:
            error = None
            try:
                await self._calls.call(wire.CheckPolicy(0, text))
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
        return await self._calls.submit(messages, coming)

    async def open_session(self, name: str, owner: str, held: int | None = None) -> int:
        session: int = await self._calls.call(
            wire.OpenSession(0, held, wire_forms.encoded(name), wire_forms.encoded(owner))
        )
        return session

    def save_soon(self, session: int, name: str, owner: str) -> None:
        self._send(wire.SaveSession(0, session, wire_forms.encoded(name), wire_forms.encoded(owner)))

    def leave(self, session: int, name: str, owner: str) -> None:
        self._send(wire.LeaveSession(0, session, wire_forms.encoded(name), wire_forms.encoded(owner)))

    async def forget(self, session: int | None, name: str, owner: str) -> bool:
        return bool(
            await self._calls.call(wire.ForgetSession(0, session, wire_forms.encoded(name), wire_forms.encoded(owner)))
        )

    async def clear_prefixes(self) -> None:
        await self._calls.call(wire.ClearPrefixes())

    async def running_reports(self, most: int) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = await self._calls.call(wire.ReportRunning(0, most))
        return reports

    def statistics(self) -> EngineStatistics:
        return self._statistics

    def give_up(self, why: EngineLost) -> None:
        self._calls.give_up(why)

    def close(self) -> None:
        stuck, self._closing = self._stuck, True
        with suppress(RuntimeError):  # the event loop may be closed
            for task in self._tasks:
                task.cancel()
        try:
            if self.process.poll() is None and stuck is None and not self._starting:
                # The transport writes later, if at all: the event loop may be at its end.
                self._socket.settimeout(SILENT)
                self._socket.sendall(wire.framed(wire.Close()))
                self._await_end()
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._kill()

    def _await_end(self) -> None:
        """Until the process has ended, hangs, or has had its time."""
        watch, ends = EngineWatch(min(SILENT, self._watch.limit), self._watch.used), time.monotonic() + CLOSING
        self._socket.settimeout(watch.every)
        while self.process.poll() is None and watch.look() is None and time.monotonic() < ends:
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                continue
            if not data:
                self.process.wait(max(0.0, ends - time.monotonic()))
            for content in self._frames.feed(data):
                frame = wire.from_engine(content)
                if isinstance(frame, wire.Beat):
                    watch.heard(frame.quiet, frame.processor)

    # What comes from the engine, on the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for content in self._frames.feed(data):
            frame = wire.from_engine(content)
            if isinstance(frame, wire.Outputs):
                if frame.statistics is not None:
                    self._statistics = frame.statistics
                self._calls.put(frame.outputs)
            elif isinstance(frame, wire.Reply):
                self._calls.replied(frame)
            elif isinstance(frame, wire.Beat):
                self._watch.heard(frame.quiet, frame.processor)
            elif isinstance(frame, wire.Gone):
                self._gone = frame.why

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing:
            self._lost = "this engine was closed"
        else:
            ended = f"the engine's process ended by itself ({how(self.process)})"
            self._lost = (self._stuck or ended) if self._gone is None else f"{ended}: {self._gone}"
            logger.error("the engine is gone", extra={"fields": {"why": self._lost}})
            if self._starts is not None:
                self._starting = True
                self._keep(self._start_anew(self._starts))
        self.give_up(EngineLost(self._lost))

    def _look(self) -> None:
        """Now and then: does it hang?"""
        if self._lost is not None or self._transport is None:
            return
        before, self._stuck = self._stuck, self._watch.look()
        if self._stuck is not None and before is None:
            logger.error("the engine hangs", extra={"fields": {"why": self._stuck}})
            self.give_up(EngineStuck(self._stuck))
            if self._starts is not None:
                self.process.kill()  # its end is seen as that of any process
        elif self._stuck is None and before is not None:
            logger.warning("the engine gets on again")

    async def _start_anew(self, starts: Starts) -> None:
        """A process in place of the one that is lost."""
        self.process.kill()
        await asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        first = self._lost
        while (seconds := starts.next()) is not None:
            self._lost = f"{first}; it is being started anew"
            await asyncio.sleep(seconds)
            try:
                launched = await asyncio.get_running_loop().run_in_executor(None, self._launch)
            except Exception as error:  # what loading raises
                first = f"the engine could not be started anew: {error}"
                logger.error("no new engine", extra={"fields": {"why": str(error)}})
                continue
            self._take_over(launched)
            self.epoch += 1
            await self._connect()
            logger.warning("the engine was started anew", extra={"fields": {"epoch": self.epoch}})
            return
        self._starting = False
        self._lost = f"{first}; it was started anew too often and stays lost"
        logger.error("the engine stays lost", extra={"fields": {"why": self._lost}})

    # What goes to it.

    def _unable(self) -> EngineLost | None:
        """Why nothing can be asked of it now."""
        if self._lost is not None or self._transport is None:
            return EngineLost(self._lost or "this engine has not been started")
        return None if self._stuck is None else EngineStuck(self._stuck)

    def _send(self, frame: wire.Frame) -> None:
        if self._transport is not None and self._lost is None:
            self._transport.write(wire.framed(frame))

    def _kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with suppress(RuntimeError):  # the event loop may be closed
            if self._transport is not None:
                self._transport.abort()
                return
        self._socket.close()
