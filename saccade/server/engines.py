"""The engine as the HTTP side sees it: one contract, kept by an engine of this process or of another one."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from saccade.engine.messages import AddRequest, EngineStatistics
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.settings.checks import PromptLimits
from saccade.engine.stream import AsyncOutputs
from saccade.errors import EngineLost, EngineStuck
from saccade.llm import LLM
from saccade.machine import device_note
from saccade.methods.policy import Policy
from saccade.models.tokenizer import Tokenizer
from saccade.server.engine_watch import STEP_LIMIT, EngineWatch, look_after
from saccade.server.kv_events import KVEvents
from saccade.server.logs import logger
from saccade.server.matchers import Compiler
from saccade.server.named_sessions import NamedSessions
from saccade.server.warming import settle, warm

T = TypeVar("T")


@dataclass(frozen=True)
class About:
    """What never changes of an engine. ``name``: of its model; ``path``: the folder of its tokenizer; ``policy``: of
    requests that name none; ``defaults``: sampling parameters, likewise; ``max_requests``: most that run at once;
    ``device``: where it runs, as torch writes it; ``session_shared``: whether other processes store its sessions,
    too."""

    name: str
    path: Path
    policy: Policy
    defaults: SamplingParams
    limits: PromptLimits
    eos_token_ids: tuple[int, ...]
    max_requests: int
    device: str
    layers: int
    heads: int
    session_shared: bool = False


class EngineFace(Protocol):
    """Everything that a server asks of an engine. It is used by one event loop's thread."""

    about: About
    tokenizer: Tokenizer
    compiler: Compiler  # of grammars; an engine of this process follows answers by it
    note: str | None  # one line on the device, where it is not plain

    @property
    def alive(self) -> bool:
        """Whether requests can be added."""
        ...

    @property
    def state(self) -> str:
        """``ok`` while requests can be added; else ``stuck``, ``starting`` (anew) or ``broken``."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why none can be added; None where they can."""
        ...

    @property
    def epoch(self) -> int:
        """How often the engine was started anew: ids of sessions are of one epoch."""
        ...

    async def start(self) -> None:
        """Called once, on the event loop, before anything else."""
        ...

    async def check_policy(self, policy: Policy) -> None:
        """PolicyError, or another SaccadeError, for a policy that the model cannot run."""
        ...

    async def submit(self, messages: Sequence[AddRequest], coming: int = 0) -> AsyncOutputs:
        """Queue requests, all of them before the same step, or none. See AsyncEngine.submit, also for ``coming``.
        EngineLost, here or where outputs are taken, once the engine has ended by itself."""
        ...

    async def open_session(self, name: str, owner: str, held: int | None = None) -> int:
        """The id of the session that is stored under the owner's name, or of one that begins. ``held``: its id so far,
        which stays unless another process has stored a later turn."""
        ...

    def save_soon(self, session: int, name: str, owner: str) -> None:
        """After a turn: store the session, where the engine stores any."""
        ...

    def leave(self, session: int, name: str, owner: str) -> None:
        """Drop a session, once it is stored where the engine stores any; a turn that runs is cancelled."""
        ...

    async def forget(self, session: int | None, name: str, owner: str) -> bool:
        """Drop a session, and what is stored under its name; whether anything was stored."""
        ...

    async def clear_prefixes(self) -> None:
        """Give up what is kept of ended requests."""
        ...

    async def running_reports(self, most: int) -> list[dict[str, Any]]:
        """Reports of at most ``most`` requests at work, once the step that runs has ended. See AsyncEngine."""
        ...

    def statistics(self) -> EngineStatistics:
        """How the engine stands: of another process, when it last said something."""
        ...

    def give_up(self, why: EngineLost) -> None:
        """Fail all that waits for the engine, and cancel what runs. Called on the event loop."""
        ...

    def close(self) -> None:
        """Cancel everything and wait until the engine has ended; not for one that hangs."""
        ...


def about_llm(llm: LLM) -> About:
    """What a server must know of a model."""
    given = str(llm.config.model)
    return About(
        # Its hub name, or its folder's or file's: where that lies is no client's affair.
        name=Path(given).name or given if Path(given).exists() else given,
        path=llm.model.path,
        policy=llm.policy,
        defaults=llm.get_default_sampling_params(),
        limits=llm.engine.checks.limits,
        eos_token_ids=tuple(llm.model.eos_token_ids),
        max_requests=llm.config.max_requests,
        device=str(llm.model.device),
        layers=llm.model.spec.layers,
        heads=llm.model.spec.heads,
        session_shared=llm.config.session_shared,
    )


def compiler_of(llm: LLM) -> Compiler:
    """Of grammars for the model's tokens, which it has read: no request's answer waits for that."""
    compiler = Compiler(llm.get_tokenizer(), llm.model.spec.vocab_size, llm.model.eos_token_ids)
    compiler.prepare()
    return compiler


class LocalEngine:
    """An engine on a thread of this process. ``kv_events``: the arguments of KVEvents, None for none. ``limit``: see
    EngineWatch; ``policies``: what ``warming.warm`` is for. A thread that hangs cannot be ended: a process that closes
    this engine then ends with exit code 1."""

    epoch = 0

    def __init__(
        self,
        llm: LLM,
        kv_events: dict[str, str | None] | None = None,
        limit: float = STEP_LIMIT,
        policies: Sequence[Policy] = (),
    ) -> None:
        warm(llm, policies)
        settle(llm)
        if kv_events is not None:
            KVEvents(llm, **kv_events)  # type: ignore[arg-type]
        self.llm, self.about, self.tokenizer = llm, about_llm(llm), llm.tokenizer
        self.compiler = compiler_of(llm)
        self._named = NamedSessions(llm)
        self.note = device_note(llm.model.device)
        self._watch = EngineWatch(limit)
        self._stuck: str | None = None
        self._looking: asyncio.Future[None] | None = None
        self._asking: set[asyncio.Future[None]] = set()  # one a call that waits, which fails it
        self._outputs: weakref.WeakSet[AsyncOutputs] = weakref.WeakSet()

    @property
    def alive(self) -> bool:
        return self.state == "ok"

    @property
    def state(self) -> str:
        if not self.llm.loop.alive:
            return "broken"
        return "ok" if self._stuck is None else "stuck"

    @property
    def trouble(self) -> str | None:
        return self.llm.loop.trouble or self._stuck

    async def start(self) -> None:
        self._watch.begin()
        self._looking = asyncio.ensure_future(look_after(self._look, self._watch.every))

    def give_up(self, why: EngineLost) -> None:
        for call in list(self._asking):
            if not call.done():
                call.set_exception(why)
        for outputs in list(self._outputs):
            if not outputs.finished:
                outputs.close()
                outputs.lose(why)

    def _look(self) -> str | None:
        pulse = self.llm.engine.watch.pulse
        self._watch.heard(pulse.quiet, pulse.processor)
        before, self._stuck = self._stuck, self._watch.look()
        if self._stuck is not None and before is None:
            logger.error("the engine hangs", extra={"fields": {"why": self._stuck}})
            self.give_up(EngineStuck(self._stuck))
        return self._stuck

    async def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        """``work``, or what :meth:`give_up` says."""
        if self._stuck is not None:
            work.close()
            raise EngineStuck(self._stuck)
        if (lost := self.llm.loop.trouble) is not None:
            work.close()
            raise EngineLost(lost)
        task = asyncio.ensure_future(work)
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking.add(failed)
        try:
            both: list[asyncio.Future[Any]] = [task, failed]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            return await task
        finally:
            self._asking.discard(failed)
            failed.cancel()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def check_policy(self, policy: Policy) -> None:
        self.llm.engine.checks.policy(policy)

    async def submit(self, messages: Sequence[AddRequest], coming: int = 0) -> AsyncOutputs:
        outputs = await self._answer(self.llm.loop.submit(messages, coming))
        self._outputs.add(outputs)
        return outputs

    async def open_session(self, name: str, owner: str, held: int | None = None) -> int:
        return await self._answer(_done(self._named.open(name, owner, held)))

    def save_soon(self, session: int, name: str, owner: str) -> None:
        self._named.save_soon(session, name, owner)

    def leave(self, session: int, name: str, owner: str) -> None:
        self._named.leave(session, name, owner)

    async def forget(self, session: int | None, name: str, owner: str) -> bool:
        return await self._answer(_done(self._named.forget(session, name, owner)))

    async def clear_prefixes(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.llm.reset_prefix_cache)

    async def running_reports(self, most: int) -> list[dict[str, Any]]:
        return await self._answer(_done(self.llm.loop.running_reports(most)))

    def statistics(self) -> EngineStatistics:
        return self._named.statistics()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        leave = partial(os._exit, 1)  # at the interpreter's end, which would wait for the engine's thread
        atexit.register(leave)
        closing = threading.Thread(target=self._close, args=(leave,), name="saccade-closing", daemon=True)
        closing.start()
        while closing.is_alive():
            closing.join(self._watch.every)
            if closing.is_alive() and self._look() is not None:
                return

    def _close(self, leave: Callable[[], None]) -> None:
        self._named.close()
        self.llm.close()
        atexit.unregister(leave)


async def _done(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)
