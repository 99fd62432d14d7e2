"""What passes between the HTTP side and an engine in a process of its own: frames of msgpack, four bytes of length
before each. Nothing that is read can run code.

Lists are shorter and faster than maps, so requests and outputs have forms of their own here (``array_like``), which
wire_forms.py makes of the engine's. Text that clients wrote passes as bytes: half of a surrogate pair is no UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from saccade.engine.messages import EngineStatistics, MapOrder, RequestOutcome, TokenLogprob

_LENGTH = 4


class Frame(msgspec.Struct, array_like=True, tag=True):
    """``call``: what a reply names; 0 where none is wanted."""

    call: int = 0


class Request(msgspec.Struct, array_like=True):
    """An AddRequest. ``grammar``: what its answer must follow, as llguidance writes it, and what errors call it."""

    request_id: int
    prompt: list[int]
    params: dict[str, Any]
    policy: str
    session: int | None
    keep: int | None
    whole: bool
    decoded: int
    shares: int | None
    grammar: tuple[str, str] | None
    cache_salt: bytes
    map_order: MapOrder | None


class Add(Frame, tag="add"):
    """``coming``: requests that follow at once."""

    requests: list[Request] = []
    coming: int = 0


class Withdraw(Frame, tag="withdraw"):
    """Take ``call``, an Add, back: its requests end if they run by now."""


class Cancel(Frame, tag="cancel"):
    request_ids: list[int] = []


class CheckPolicy(Frame, tag="policy"):
    policy: str = ""


class Session(Frame):
    """``session``: the engine's, None where it has none. ``name`` is bytes: a client's text."""

    session: int | None = None
    name: bytes = b""
    owner: bytes = b""


class OpenSession(Session, tag="open"):
    pass


class SaveSession(Session, tag="save"):
    pass


class LeaveSession(Session, tag="leave"):
    pass


class ForgetSession(Session, tag="forget"):
    pass


class ReportRunning(Frame, tag="report"):
    most: int = 0


class ClearPrefixes(Frame, tag="clear"):
    pass


class Close(Frame, tag="close"):
    pass


class Beat(Frame, tag="beat"):
    """A sign of life (engine_watch.EngineWatch.heard)."""

    quiet: float = 0.0
    processor: float | None = None


class Loaded(Frame, tag="loaded"):
    """The engine's first word. ``path``: the folder of the model's tokenizer."""

    path: str = ""


class Gone(Frame, tag="gone"):
    """The engine's last word: why its process ends."""

    why: str = ""


class Ready(Frame, tag="ready"):
    """The engine takes requests: what :class:`~saccade.server.engines.About` says."""

    about: dict[str, Any] = {}
    note: str | None = None
    statistics: EngineStatistics | None = None


class Reply(Frame, tag="reply"):
    """``error``: the name of an error's class, and its message."""

    value: Any = None
    error: tuple[str, str] | None = None


class Output(msgspec.Struct, array_like=True):
    """A StepOutput. Of an outcome's prompt only the length passes: the other side has its tokens."""

    request_id: int
    text: str
    tokens: list[int]
    prefilled: int
    prefill_total: int
    logprobs: list[dict[int, TokenLogprob]]
    prompt: int = 0
    outcome: RequestOutcome | None = None
    cached: int = 0
    kept: int = 0


class Outputs(Frame, tag="outputs"):
    """What a step did, and how the engine stands after it."""

    outputs: list[Output] = []
    statistics: EngineStatistics | None = None


ToEngine = (
    Add
    | Withdraw
    | Cancel
    | CheckPolicy
    | OpenSession
    | SaveSession
    | LeaveSession
    | ForgetSession
    | ReportRunning
    | ClearPrefixes
    | Close
)
FromEngine = Loaded | Ready | Reply | Outputs | Beat | Gone
_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine).decode
from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def framed(frame: Frame) -> bytes:
    """A frame as it is sent."""
    content = bytearray(_LENGTH)
    _encoder.encode_into(frame, content, _LENGTH)
    content[:_LENGTH] = (len(content) - _LENGTH).to_bytes(_LENGTH, "little")
    return bytes(content)


class Frames:
    """Cuts a stream of bytes into frames' contents."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        rest, start = self._rest, 0
        rest += data
        while len(rest) - start >= _LENGTH:
            end = start + _LENGTH + int.from_bytes(rest[start : start + _LENGTH], "little")
            if end > len(rest):
                break
            yield bytes(rest[start + _LENGTH : end])
            start = end
        del rest[:start]
