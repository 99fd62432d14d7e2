"""What answers have in common, whichever endpoint gives them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, ClassVar
from uuid import uuid4

from saccade.engine.messages import RequestOutcome, StepOutput
from saccade.methods.policy import Policy
from saccade.server.admission import Caller
from saccade.server.errors import ApiError
from saccade.server.events import DONE, PING, error_event, event
from saccade.server.generation import Ask, Generation, Piece
from saccade.server.params import refuse_unsupported
from saccade.server.protocol import Sampling
from saccade.server.serving import Serving
from saccade.server.usage import counts, usage

JSON = dict[str, Any]


class Endpoint:
    """One request. :meth:`ask` checks it; then :meth:`answer`, or :meth:`stream`, tells what a generation gives.
    ``prefix``: of its id; ``ping``, ``done``: what a stream says while it is quiet, and at its end."""

    prefix: ClassVar[str]
    ping: ClassVar[bytes] = PING
    done: ClassVar[bytes] = DONE

    def __init__(self, serving: Serving, caller: Caller, body: Sampling) -> None:
        self.serving, self.caller = serving, caller
        route = f"{caller.route}-" if caller.route else ""  # so that what goes on from this answer finds its replica
        self.id = f"{self.prefix}{route}{body.request_id or uuid4().hex}"
        self.model = serving.model(body.model)
        self.created = int(time.time())
        refuse_unsupported(body)

    async def ask(self) -> Ask:
        """What the engine is to do. ApiError for a request that it cannot serve as asked."""
        raise NotImplementedError

    async def answer(self, generation: Generation) -> JSON:
        """The whole answer."""
        raise NotImplementedError

    def opening(self, generation: Generation) -> Iterable[bytes]:
        """Events before the first piece."""
        return ()

    def events(self, generation: Generation, index: int, output: StepOutput) -> Iterable[bytes]:
        """What one piece of one choice is told by."""
        raise NotImplementedError

    def closing(self, generation: Generation) -> Iterable[bytes]:
        """Events after the last piece."""
        return ()

    def failure(self, error: ApiError) -> Iterable[bytes]:
        """How the stream says that it failed: no status can be sent any more."""
        return (error_event(error),)

    async def told(self, generation: Generation, first: list[Piece]) -> AsyncGenerator[list[bytes], None]:
        """The answer as events: those of all that came at once together. ``first``: what has been taken already.
        ApiError for what goes wrong on the way. ``generation`` is closed at the end."""
        try:
            yield list(self.opening(generation))
            pieces = first
            while pieces or not generation.finished:
                pieces = pieces or await generation.take()
                yield [one for index, output in pieces for one in self.events(generation, index, output)]
                pieces = []
            yield list(self.closing(generation))
        finally:
            generation.close()

    async def stream(self, generation: Generation, first: list[Piece]) -> AsyncGenerator[bytes, None]:
        """:meth:`told` as the body of a response: events that came at once in one write. What goes wrong is an event
        too."""
        try:
            async with aclosing(self.told(generation, first)) as told:
                async for events in told:
                    if events:
                        yield b"".join(events)
        except ApiError as error:
            for said in self.failure(error):
                yield said
        if self.done:
            yield self.done


class Choices(Endpoint):
    """An answer of several choices, as OpenAI's older endpoints have it. :meth:`ask` sets ``policy``, ``n`` and
    ``samples``. ``whole``, ``part``: what the objects are called."""

    whole: ClassVar[str]
    part: ClassVar[str]
    policy: Policy
    n: int  # samples of a prompt
    samples: int

    def __init__(self, serving: Serving, caller: Caller, body: Sampling) -> None:
        super().__init__(serving, caller, body)
        options = body.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        self.continuous = options is not None and bool(options.continuous_usage_stats)
        self.reports = bool(body.report)

    def head(self, kind: str) -> JSON:
        """How the answer, or a chunk of it, begins."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def choice(self, index: int, said: JSON, scores: JSON | None, ending: JSON) -> JSON:
        """One choice: ``said``, its log-probabilities, and how it ended."""
        return {"index": index, **said, "logprobs": scores, **ending}

    def ending(self, outcome: RequestOutcome, reason: str) -> JSON:
        """How a choice ended."""
        ended: JSON = {"finish_reason": reason, "stop_reason": outcome.stop_reason}
        return ended | {"report": outcome.report} if self.reports else ended

    def usage(self, generation: Generation, outcomes: list[RequestOutcome]) -> JSON:
        """What it cost."""
        return usage(outcomes, generation.prompt_tokens, generation.tokens, self.n, self.policy.text)

    def completed(self, generation: Generation, outcomes: list[RequestOutcome], choices: list[JSON]) -> JSON:
        """The whole answer of ``choices``."""
        return {
            **self.head(self.whole),
            "choices": choices,
            "usage": self.usage(generation, outcomes),
            "system_fingerprint": None,
        }

    def chunk(
        self, generation: Generation, index: int, said: JSON, scores: JSON | None = None, ending: JSON | None = None
    ) -> bytes:
        """What is new of one choice."""
        choice = self.choice(index, said, scores, {"finish_reason": None} if ending is None else ending)
        chunk = {**self.head(self.part), "choices": [choice]}
        if self.continuous:
            chunk["usage"] = counts(generation.prompt_tokens, generation.tokens)
        return event(chunk)

    def closing(self, generation: Generation) -> Iterable[bytes]:
        if self.wants_usage:
            outcomes = [generation.outcomes[index] for index in range(self.samples)]
            yield event({**self.head(self.part), "choices": [], "usage": self.usage(generation, outcomes)})
