"""Samples on their way from the engine to one client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest, MapOrder, RequestOutcome, StepOutput
from saccade.engine.sampling.params import MOST_BIAS, SamplingParams
from saccade.engine.sampling.steering import Constraint
from saccade.engine.stream import AsyncOutputs
from saccade.errors import EngineLost, RequestError, is_of
from saccade.methods.policy import Policy
from saccade.server.admission import Caller
from saccade.server.errors import ApiError, bad_request, from_saccade
from saccade.server.serving import Serving
from saccade.server.sessions import Held

GRACE = 1.0  # seconds that an engine has to end a request whose client is to be told now
TURNS = 5  # of the event loop, in which connections that wait are seen, and their requests read

Piece = tuple[int, StepOutput]  # a choice's number, and what is new of it


@dataclass
class Ask:
    """What a client wants: ``params.n`` samples for each of ``prompts``, in this order. ``answers``: the one token that
    the answers to a prompt are to be, by its place, whatever the model says."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    policy: Policy
    session: str | None = None
    constraint: Constraint | None = None
    deadline: float | None = None
    cache_salt: str | None = None
    map_order: MapOrder | None = None
    answers: Mapping[int, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n


@dataclass(eq=False)
class Generation:
    """One :class:`Ask` at work. :meth:`start`, then :meth:`take` until ``finished``, then always :meth:`close`."""

    serving: Serving
    caller: Caller
    ask: Ask
    outcomes: dict[int, RequestOutcome] = field(default_factory=dict)
    tokens: int = 0  # of all answers, so far
    cached: int = 0  # tokens of the prompts that did not have to be computed, as far as is known
    kept: int = 0  # and those that later requests can go on from
    _places: dict[int, int] = field(default_factory=dict)
    _outputs: AsyncOutputs | None = None
    _held: Held | None = None
    _timer: asyncio.TimerHandle | None = None
    _why: ApiError | None = None  # what ended it early
    _failure: ApiError | None = None  # of a sample; told once what came before it has been
    _entered: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.ask.prompts))

    @property
    def request_ids(self) -> list[int]:
        """The engine's, of its samples."""
        return list(self._places)

    @property
    def finished(self) -> bool:
        return len(self.outcomes) == self.ask.samples and self._failure is None

    async def start(self) -> Generation:
        """Hand it to the engine. ApiError where it is not let in; nothing is left behind then."""
        ask, serving = self.ask, self.serving
        if ask.session is not None and ask.samples != 1:
            raise bad_request("a session continues one answer; use one prompt and n=1", "session_id")
        serving.admission.enter(self.caller, ask.samples)
        self._entered = True
        try:
            if ask.session is not None:
                self._held = await serving.sessions.acquire(self.caller, ask.session)
            messages = self._messages()
            self._places = {message.request_id: index for index, message in enumerate(messages)}
            self._last = [0.0] * len(messages)
            # A client that set its own limit is told so by a status of its own.
            limits = [(limit, status) for limit, status in _limits(ask, serving) if limit is not None]
            if limits:
                limit, status = min(limits)
                self._timer = asyncio.get_running_loop().call_later(limit, self._expire, limit, status)
            if not serving.engine.statistics().running:
                for _ in range(TURNS):
                    await asyncio.sleep(0)
            serving.admission.came(self.caller)
            self._outputs = await serving.engine.submit(messages, serving.admission.coming)
            serving.running.add(self)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):  # the client left while the engine had not let it in
                self.serving.metrics.aborted(ask.samples)
            self.close()
            raise
        if self._why is not None:
            self._end_soon(self._outputs)
        return self

    async def take(self) -> list[Piece]:
        """New tokens, text or ends of choices, as soon as there are any; nothing once all have ended. ApiError where a
        sample failed or was ended early, once all that came before has been taken."""
        assert self._outputs is not None, "started"
        if self._failure is not None:
            raise self._failure
        while not self._outputs.finished:
            try:
                outputs = await self._outputs.take()
            except EngineLost as error:
                raise self._why or from_saccade(error) from error
            for output in outputs:
                self.cached, self.kept = max(self.cached, output.cached), max(self.kept, output.kept)
            pieces = [
                (self._places[output.request_id], output) for output in outputs if output.new_tokens or output.finished
            ]
            told = [(index, said) for index, output in pieces if (said := self._told(index, output)) is not None]
            if told:
                return told
            if self._failure is not None:
                raise self._failure
        return []

    def _told(self, index: int, output: StepOutput) -> StepOutput | None:
        """Count an output, and give what of it the client is told: of a sample that failed what came before, if any."""
        try:
            self._count(index, output)
        except ApiError as error:
            self._failure = self._failure or error
            return replace(output, outcome=None) if output.new_tokens else None
        return output

    async def first(self, seconds: float) -> list[Piece]:
        """:meth:`take` for at most so long; nothing where nothing came."""
        try:
            async with asyncio.timeout(seconds):
                return await self.take()
        except TimeoutError:
            return []

    async def all(self) -> list[RequestOutcome]:
        """Every choice, once they have ended."""
        while not self.finished:
            await self.take()
        return [self.outcomes[index] for index in range(self.ask.samples)]

    def end(self, why: ApiError) -> None:
        """End it early: the next reader gets ``why``."""
        if self._why is None and not self.finished:
            self._why = why
            if self._outputs is not None:
                self._end_soon(self._outputs)

    def _end_soon(self, outputs: AsyncOutputs) -> None:
        """Have the engine end it; the client does not wait for one that does not answer."""
        outputs.close()
        if not outputs.finished:
            asyncio.get_running_loop().call_later(GRACE, outputs.lose, EngineLost("the engine did not answer"))

    def close(self) -> None:
        """Give back all that it holds; what has not ended is cancelled. Closing twice does nothing."""
        self.serving.running.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._outputs is not None:
            self._outputs.close()
            self.serving.metrics.aborted(self.ask.samples - len(self.outcomes))
            self._outputs = None
        if self._held is not None:
            self.serving.sessions.release(self._held, self.finished)
            self._held = None
        if self._entered:
            self._entered = False
            self.serving.admission.leave(self.caller, self.ask.samples)

    def _messages(self) -> list[AddRequest]:
        ask, messages = self.ask, []
        for place, prompt in enumerate(ask.prompts):
            params = ask.params
            if place in ask.answers:
                params = replace(params, temperature=0.0, logit_bias={ask.answers[place]: MOST_BIAS})
            first = new_request_id()
            for index in range(params.n):
                messages.append(
                    AddRequest(
                        first if index == 0 else new_request_id(),
                        prompt,
                        params.for_sample(index),
                        ask.policy,
                        session=None if self._held is None else self._held.id,
                        whole=self._held is not None,
                        shares=None if index == 0 else first,
                        constraint=ask.constraint,
                        cache_salt=f"{self.caller.name}\0{ask.cache_salt or ''}",  # no two keys share a prefix
                        map_order=ask.map_order,
                    )
                )
        return messages

    def _count(self, index: int, output: StepOutput) -> None:
        now, new = time.perf_counter(), len(output.new_tokens)
        self.tokens += new
        if new:
            if self._last[index]:
                self.serving.metrics.tokens(now - self._last[index], new)
            self._last[index] = now
        outcome = output.outcome
        if outcome is None:
            return
        self.outcomes[index] = outcome
        self.serving.ended(self.caller, outcome, self.ask.policy)
        if outcome.finish_reason == "cancelled":
            raise self._why or ApiError(500, "the request was cancelled", "cancelled")
        if outcome.error is not None:
            if is_of(outcome.error_type, EngineLost):
                raise from_saccade(EngineLost(outcome.error))
            status = 400 if is_of(outcome.error_type, RequestError) else 500
            raise ApiError(status, f"the request failed: {outcome.error}", "generation_failed")

    def _expire(self, seconds: float, status: int) -> None:
        self.end(ApiError(status, f"the request took longer than {seconds:g} seconds", "deadline_exceeded"))

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        while not self.finished:
            yield await self.take()


def _limits(ask: Ask, serving: Serving) -> tuple[tuple[float | None, int], ...]:
    """Seconds that a request may take, and what it is answered with after them."""
    return (ask.deadline, 408), (serving.config.deadline, 504)
