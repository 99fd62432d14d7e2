"""What every endpoint stands on: the model, who may ask for what, and prompts as tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from saccade.engine.messages import RequestOutcome
from saccade.errors import EngineLost, RequestError, SaccadeError, shown
from saccade.methods.policy import Policy
from saccade.models.letters import most_letters
from saccade.server import reasoning, tool_formats
from saccade.server.admission import Admission, Caller
from saccade.server.anthropic_system import SystemHeads
from saccade.server.bodies import Room
from saccade.server.documents import Documents
from saccade.server.engines import EngineFace
from saccade.server.errors import ApiError, bad_request, from_saccade, too_long
from saccade.server.grammars import Grammars
from saccade.server.insight import Insight
from saccade.server.logs import add_costs, logger
from saccade.server.messages import conversation
from saccade.server.metrics import Metrics
from saccade.server.responses_store import ResponseStore
from saccade.server.sessions import Sessions
from saccade.server.settings import ServerConfig, chosen
from saccade.server.tool_formats.words import Words
from saccade.server.tracing import Tracing
from saccade.server.weight import weight

_SHORT = 4096  # characters that are turned into tokens on the event loop, in far less than a millisecond
_LONG = 262_144  # characters of texts that become tokens one after the other: a token takes a kilobyte meanwhile
_SMALL = 128 * 1024  # bytes of a body that are parsed there, in a few

T = TypeVar("T")
_parsed = lru_cache(1024)(Policy.parse)  # most clients ask for one of a few


class Running(Protocol):
    """Something that clients wait for."""

    caller: Caller

    @property
    def request_ids(self) -> list[int]:
        """The engine's."""
        ...

    def end(self, why: ApiError) -> None:
        """End it early, and say why."""
        ...


class Socket(Protocol):
    """A connection that outlives its answers."""

    def drain(self) -> None:
        """Close once it has the answer that it waits for."""
        ...


class Serving:
    """One model behind one server."""

    def __init__(self, engine: EngineFace, config: ServerConfig) -> None:
        template = str(getattr(engine.tokenizer.hf, "chat_template", None) or "")
        format = tool_formats.format_of(template)
        config = replace(
            config,
            tool_parser=chosen(config.tool_parser, None if format is None else format.name),
            reasoning_parser=chosen(config.reasoning_parser, reasoning.format_of(template)),
        )
        self.engine, self.config = engine, config
        about = self.about = engine.about
        self.tokenizer = engine.tokenizer
        self.words = Words(engine.tokenizer.hf)
        self.names = config.names or (about.name,)
        self.created = int(time.time())
        self.defaults = about.defaults
        self.admission = Admission(about.max_requests + config.max_queue)
        self.sessions = Sessions(engine, config.max_sessions, config.session_seconds)
        self.responses = ResponseStore(config.max_responses)
        self.metrics = Metrics(engine, self.names[0])
        self.insight = Insight()
        self.heads = SystemHeads()
        self.tracing: Tracing | None = None
        if config.otlp_traces_endpoint is not None:
            self.tracing = Tracing.to(config.otlp_traces_endpoint, self.names[0])
        self.running: set[Running] = set()
        self.sockets: set[Socket] = set()
        self.mapping = False  # whether a selection map is being made
        self.grammars = Grammars(engine.compiler)
        self.grammars.prepare()  # or the first grammar would hold up all streams
        self.documents = Documents()
        each = most_letters(engine.tokenizer.hf)
        self._most_letters = None if each is None else each * about.limits.max_model_len
        self.room = Room(max(config.max_bodies, config.max_body))
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="saccade-text")
        self._turns = asyncio.Lock()
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saccade-long-text")
        self._parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saccade-parser")

    @property
    def ready(self) -> bool:
        """Whether new requests are answered."""
        return self.engine.alive and not self.admission.draining

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self.admission.draining = True
        for one in list(self.sockets):
            one.drain()

    def end_all(self) -> None:
        """End what still runs; its clients are told."""
        for one in list(self.running):
            one.end(ApiError(503, "this server shut down before the answer was complete", "shutting_down"))

    def close(self) -> None:
        """End the engine; nothing can be asked any more."""
        for pool in (self._threads, self._long, self._parser):
            pool.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()
        self.documents.close()
        self.engine.close()
        if self.tracing is not None:
            self.tracing.close()

    def answered(self, caller: Caller, asked: tuple[str, str, str], status: int, began: float) -> None:
        """A request has its answer: it is counted, traced, and has a line in the log. ``asked``: its method, its path
        and the route that served it; ``began`` by time.perf_counter."""
        method, path, route = asked
        self.metrics.answered(route, status)
        if self.tracing is not None and caller.span is not None:
            self.tracing.answered(caller.span, method, route, status)
        fields: dict[str, Any] = {
            "request_id": caller.request_id,
            "method": method,
            "path": path[:200],
            "status": status,
            "seconds": round(time.perf_counter() - began, 4),
        }
        if caller.key is not None:
            fields["key"] = caller.key.name
        logger.info("request", extra={"fields": fields | caller.costs})

    def ended(self, caller: Caller, outcome: RequestOutcome, policy: Policy) -> None:
        """A sample of ``caller`` has ended: it is counted, and told to observers."""
        self.metrics.ended(outcome, policy)
        self.insight.ended(caller, outcome)
        add_costs(caller.costs, outcome)
        if self.tracing is not None:
            self.tracing.sample(caller.span, outcome)

    def model(self, name: str | None) -> str:
        """The name that an answer bears. 404 for a model that is not served here."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                404, f"the model {shown(name)} does not exist; served here: {served}", "model_not_found", "model"
            )
        return name

    async def policy(self, caller: Caller, asked: str | Mapping[str, Any] | None) -> Policy:
        """The policy of a request. 400 for one that is none or cannot run, 403 for one that it may not choose."""
        if asked is None:
            return self.about.policy
        try:
            short = isinstance(asked, str) and len(asked) <= 256
            policy = _parsed(asked) if short else Policy.parse(asked)
            await self.engine.check_policy(policy)
        except EngineLost as error:
            raise from_saccade(error) from error
        except SaccadeError as error:
            raise bad_request(str(error), "policy") from error
        if policy == self.about.policy:
            return policy
        for rules in (self.config.policies, *([] if caller.key is None else [caller.key.policies])):
            if not rules.allows(policy):
                raise ApiError(
                    403,
                    f"the policy {shown(policy.text)} is not allowed here; allowed: {rules.text}",
                    "policy_not_allowed",
                    "policy",
                )
        return policy

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on text of ``size`` characters: long ones must not hold up others' streams, nor very long ones the
        long ones."""
        if size <= _SHORT:
            return work()
        threads = self._threads if size <= _LONG else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def parse(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on a body of ``size`` bytes. A large one is worked on by one thread, one after the other: a decoder
        holds the interpreter's lock for as long as it takes, and several of them would share it among themselves. Of
        others that come at once the event loop takes one a turn, so that they hold no other request up together."""
        if size > _SMALL:
            return await asyncio.get_running_loop().run_in_executor(self._parser, work)
        if size > _SHORT:
            async with self._turns:
                await asyncio.sleep(0)
                return work()
        return work()

    async def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; 400 for text that is none."""
        self._check_letters(len(text))
        tokenizer = self.tokenizer
        return await self.off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))

    async def conversation(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages of a client, made ready for :meth:`template`. 400 for those that are none."""
        return await self.off_loop(weight(messages, _SHORT), lambda: conversation(messages))

    async def template(
        self,
        messages: Sequence[Mapping[str, Any]],
        generate: bool,
        variables: Mapping[str, Any],
        control: bool | None = None,
        goes_on: bool = False,
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template. ``control``: whether what reads like a control
        token in it is one; None leaves it to the server. ``goes_on``: the last message is left open, for an answer that
        goes on with it."""
        if self._most_letters is not None:  # a template may leave some of it out, thoughts say
            said = sum(len(text) for one in messages if isinstance(text := one.get("content"), str))
            self._check_letters(said // 4)
        size = weight([messages, variables], _LONG)
        tokenizer, allowed = self.tokenizer, self.config.allow_control_tokens if control is None else control
        return await self.off_loop(
            size, lambda: tokenizer.apply_chat_template(messages, generate, variables, allowed, goes_on)
        )

    def _check_letters(self, letters: int) -> None:
        """400 for a text that is longer than any prompt: turning it into tokens would take minutes and gigabytes."""
        most = self._most_letters
        if most is not None and letters > most:
            raise too_long(
                f"this model's maximum context length is {self.about.limits.max_model_len} tokens, which have {most} "
                "characters at the very most, but the request has more; shorten the prompt"
            )

    def check_length(self, prompt: Sequence[int], answer: int | None, param: str) -> None:
        """400 with the code ``context_length_exceeded`` for a prompt, or a prompt and its answer, that can never fit;
        other mistakes of a prompt too."""
        most = self.about.limits.max_model_len
        if len(prompt) >= most or (answer is not None and len(prompt) + answer > most):
            asked = f" and {answer} of its answer" if answer is not None else ""
            raise too_long(
                f"this model's maximum context length is {most} tokens, but the request has {len(prompt)} tokens of "
                f"its prompt{asked}; shorten the prompt or the answer",
                param,
            )
        try:
            self.about.limits.check(list(prompt))
        except RequestError as error:
            raise bad_request(str(error), param) from error
        except SaccadeError as error:
            raise from_saccade(error) from error
