"""What the HTTP side has asked of an engine in another process, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from saccade.engine.messages import AddRequest
from saccade.engine.stream import AsyncOutputs, Stream
from saccade.errors import EngineLost
from saccade.server import wire, wire_forms


class EngineCalls:
    """Calls that wait for a reply, and requests that wait for outputs. ``send`` gives a frame to the engine, or drops
    it where there is none; ``trouble`` tells why nothing can be asked now, None where it can."""

    def __init__(self, send: Callable[[wire.Frame], None], trouble: Callable[[], EngineLost | None]) -> None:
        self.send, self._trouble = send, trouble
        self._number = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._asked: dict[int, tuple[Stream, list[int], AsyncOutputs]] = {}  # by request id, with its prompt

    @property
    def requests(self) -> list[int]:
        """Ids of the requests that wait for outputs."""
        return list(self._asked)

    async def call(self, frame: wire.Frame) -> Any:
        """Send a frame and wait for its reply. Raises what the engine answers, and ``trouble``."""
        if (trouble := self._trouble()) is not None:
            raise trouble
        self._number += 1
        frame.call = self._number
        reply = self._calls[frame.call] = asyncio.get_running_loop().create_future()
        try:
            self.send(frame)
            return await reply
        finally:
            self._calls.pop(frame.call, None)

    async def submit(self, messages: Sequence[AddRequest], coming: int) -> AsyncOutputs:
        """See EngineFace.submit."""
        outputs = AsyncOutputs([one.request_id for one in messages], self.cancel, threads=False)
        frame = wire.Add(0, [wire_forms.request(one) for one in messages], coming)
        for message, stream in zip(messages, outputs.streams):
            self._asked[message.request_id] = stream, message.prompt, outputs
        try:
            await self.call(frame)
        except BaseException as error:
            for message in messages:
                self._asked.pop(message.request_id, None)
            if isinstance(error, asyncio.CancelledError):
                self.send(wire.Withdraw(frame.call))
                self.cancel([message.request_id for message in messages])
            raise
        return outputs

    def cancel(self, request_ids: Sequence[int]) -> None:
        self.send(wire.Cancel(0, list(request_ids)))

    def replied(self, frame: wire.Reply) -> None:
        """The engine has answered a call."""
        call = self._calls.pop(frame.call, None)
        if call is None or call.done():
            return
        if frame.error is None:
            call.set_result(frame.value)
        else:
            call.set_exception(wire_forms.raised(frame.error))

    def put(self, outputs: Sequence[wire.Output]) -> None:
        """A step of the engine's has ended, with these."""
        for output in outputs:
            known = self._asked.get(output.request_id)
            if known is not None:
                known[0].put(wire_forms.step_output(output, known[1]))
                if output.outcome is not None:
                    del self._asked[output.request_id]

    def give_up(self, why: EngineLost) -> None:
        """Have all that waits fail, and the engine end it if it can."""
        for number, call in self._calls.items():
            if not call.done():
                call.set_exception(why)
                self.send(wire.Withdraw(number))
        self.cancel(self.requests)
        for outputs in {id(one): one for _, _, one in self._asked.values()}.values():
            outputs.lose(why)
        self._calls.clear()
        self._asked.clear()
