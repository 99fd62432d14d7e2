"""The engine as the HTTP side sees it: one contract, kept by an engine of this process or of another one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from saccade.engine.checks import PromptLimits
from saccade.engine.messages import AddRequest, EngineStatistics
from saccade.engine.params import SamplingParams
from saccade.engine.stream import AsyncOutputs
from saccade.llm import LLM
from saccade.machine import device_note
from saccade.methods.policy import Policy
from saccade.models.tokenizer import Tokenizer
from saccade.server.kv_events import KVEvents
from saccade.server.logs import logger
from saccade.server.named_sessions import NamedSessions

PREPARING = 30.0  # seconds, at most, before a server on a GPU takes requests


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
    note: str | None  # one line on the device, where it is not plain

    @property
    def alive(self) -> bool:
        """Whether requests can be added."""
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

    def close(self) -> None:
        """Cancel everything and wait until the engine has ended."""
        ...


def about_llm(llm: LLM) -> About:
    """What a server must know of a model."""
    given = str(llm.config.model)
    return About(
        # Its hub name, or its folder's.
        name=Path(given).name or given if Path(given).is_dir() else given,
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


def prepare(llm: LLM) -> None:
    """Record the steps of a GPU that requests under the server's own policy will take, and log how many."""
    done = llm.engine.prepare(llm.policy, PREPARING)
    if done is not None:
        fields = {"steps": done.recorded, "of": done.wanted, "seconds": round(done.seconds, 1)}
        logger.info("recorded", extra={"fields": fields})


class LocalEngine:
    """An engine on a thread of this process. ``kv_events``: the arguments of KVEvents, None for none."""

    def __init__(self, llm: LLM, kv_events: dict[str, str | None] | None = None) -> None:
        prepare(llm)
        if kv_events is not None:
            KVEvents(llm, **kv_events)  # type: ignore[arg-type]
        self.llm, self.about, self.tokenizer = llm, about_llm(llm), llm.tokenizer
        self._named = NamedSessions(llm)
        self.note = device_note(llm.model.device)

    @property
    def alive(self) -> bool:
        return self.llm.loop.alive

    async def start(self) -> None:
        pass

    async def check_policy(self, policy: Policy) -> None:
        self.llm.engine.checks.policy(policy)

    async def submit(self, messages: Sequence[AddRequest], coming: int = 0) -> AsyncOutputs:
        return await self.llm.loop.submit(messages, coming)

    async def open_session(self, name: str, owner: str, held: int | None = None) -> int:
        return await asyncio.wrap_future(self._named.open(name, owner, held))

    def save_soon(self, session: int, name: str, owner: str) -> None:
        self._named.save_soon(session, name, owner)

    def leave(self, session: int, name: str, owner: str) -> None:
        self._named.leave(session, name, owner)

    async def forget(self, session: int | None, name: str, owner: str) -> bool:
        return await asyncio.wrap_future(self._named.forget(session, name, owner))

    async def clear_prefixes(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.llm.reset_prefix_cache)

    async def running_reports(self, most: int) -> list[dict[str, Any]]:
        return await asyncio.wrap_future(self.llm.loop.running_reports(most))

    def statistics(self) -> EngineStatistics:
        return self._named.statistics()

    def close(self) -> None:
        self._named.close()
        self.llm.close()
