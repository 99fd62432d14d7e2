"""The engine as the HTTP side sees it: one contract, kept by an engine of this process or of another one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from saccade.engine.checks import PromptLimits
from saccade.engine.messages import AddRequest, EngineStatistics
from saccade.engine.params import SamplingParams
from saccade.engine.stream import AsyncOutputs
from saccade.llm import LLM
from saccade.machine import device_note
from saccade.methods.policy import Policy
from saccade.models.tokenizer import Tokenizer
from saccade.server.kept_sessions import KeptSessions
from saccade.server.kv_events import KVEvents


@dataclass(frozen=True)
class About:
    """What never changes of an engine. ``name``: of its model; ``path``: the folder of its tokenizer; ``policy``: of
    requests that name none; ``defaults``: sampling parameters, likewise; ``max_requests``: most that run at once;
    ``device``: where it runs, as torch writes it."""

    name: str
    path: Path
    policy: Policy
    defaults: SamplingParams
    limits: PromptLimits
    eos_token_ids: tuple[int, ...]
    max_requests: int
    device: str


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

    async def submit(self, messages: Sequence[AddRequest]) -> AsyncOutputs:
        """Queue requests, all of them before the same step, or none. See AsyncEngine.submit. EngineLost, here or where
        outputs are taken, once the engine has ended by itself."""
        ...

    async def open_session(self, owner: str, name: str) -> int:
        """The id of a session that goes on from what is stored under that name of that owner, or that begins."""
        ...

    def save_session_soon(self, session: int, owner: str, name: str) -> None:
        """Store it as it is between two turns, if sessions are stored."""
        ...

    def leave_session(self, session: int, owner: str, name: str) -> None:
        """Drop it; what is stored of it stays."""
        ...

    async def forget_stored(self, owner: str, name: str) -> bool:
        """Remove what is stored under a name; False where there is nothing."""
        ...

    def forget_soon(self, session: int) -> None:
        """Drop a session; a turn that runs is cancelled."""
        ...

    async def clear_prefixes(self) -> None:
        """Give up what is kept of ended requests."""
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
    )


class LocalEngine:
    """An engine on a thread of this process. ``kv_events``: the arguments of KVEvents, None for none."""

    def __init__(self, llm: LLM, kv_events: dict[str, str | None] | None = None) -> None:
        if kv_events is not None:
            KVEvents(llm, **kv_events)  # type: ignore[arg-type]
        self.llm, self.about, self.tokenizer = llm, about_llm(llm), llm.tokenizer
        self._sessions = KeptSessions(llm)
        self.note = device_note(llm.model.device)

    @property
    def alive(self) -> bool:
        return self.llm.loop.alive

    async def start(self) -> None:
        pass

    async def check_policy(self, policy: Policy) -> None:
        self.llm.engine.checks.policy(policy)

    async def submit(self, messages: Sequence[AddRequest]) -> AsyncOutputs:
        return await self.llm.loop.submit(messages)

    async def open_session(self, owner: str, name: str) -> int:
        return await asyncio.wrap_future(self._sessions.open(owner, name))

    def save_session_soon(self, session: int, owner: str, name: str) -> None:
        self._sessions.save_soon(session, owner, name)

    def leave_session(self, session: int, owner: str, name: str) -> None:
        self._sessions.leave(session, owner, name)

    async def forget_stored(self, owner: str, name: str) -> bool:
        return await asyncio.wrap_future(self._sessions.forget_stored(owner, name))

    def forget_soon(self, session: int) -> None:
        self.llm.loop.forget_soon(session)

    async def clear_prefixes(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.llm.reset_prefix_cache)

    def statistics(self) -> EngineStatistics:
        return self._sessions.statistics()

    def close(self) -> None:
        self._sessions.close()
        self.llm.close()
