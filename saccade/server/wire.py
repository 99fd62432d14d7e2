"""What passes between the HTTP side and an engine in a process of its own: frames of msgpack, four bytes of length
before each. Nothing that is read can run code.

Lists are shorter and faster than maps, so requests and outputs have forms of their own here (``array_like``). Text that
clients wrote passes as bytes: half of a surrogate pair is no UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from saccade import errors
from saccade.engine.checks import PromptLimits
from saccade.engine.config import EngineConfig
from saccade.engine.messages import AddRequest, EngineStatistics, MapOrder, RequestOutcome, StepOutput, TokenLogprob
from saccade.engine.params import SamplingParams
from saccade.engine.steering import Constraint
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy
from saccade.server.engines import About

_LENGTH = 4
_TEXTS = ("stop", "bad_words")


class Frame(msgspec.Struct, array_like=True, tag=True):
    """``call``: what a reply names; 0 where none is wanted."""

    call: int = 0


class Request(msgspec.Struct, array_like=True):
    """An AddRequest. ``grammar``: what its answer must follow, as llguidance writes it."""

    request_id: int
    prompt: list[int]
    params: dict[str, Any]
    policy: str
    session: int | None
    keep: int | None
    whole: bool
    decoded: int
    shares: int | None
    grammar: str | None
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


class Ready(Frame, tag="ready"):
    """The engine's first word: what :class:`~saccade.server.engines.About` says."""

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
FromEngine = Ready | Reply | Outputs
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


@dataclass(frozen=True)
class Written:
    """A Constraint that passes as its text; it is compiled where the engine is."""

    source: str

    def begin(self) -> Any:
        raise TypeError("a written grammar is compiled before it begins")


def request(message: AddRequest) -> Request:
    """A message as it passes. Its constraint has a ``source``."""
    constraint: Any = message.constraint
    return Request(
        message.request_id,
        message.prompt,
        _params(message.params),
        message.policy.text,
        message.session,
        message.keep,
        message.whole,
        message.decoded,
        message.shares,
        None if constraint is None else constraint.source,
        encoded(message.cache_salt),
        message.map_order,
    )


def add_request(given: Request, compile: Callable[[str], Constraint]) -> AddRequest:
    """The message of :func:`request`."""
    return AddRequest(
        given.request_id,
        given.prompt,
        _params_of(given.params),
        _policy(given.policy),
        given.session,
        given.keep,
        given.whole,
        given.decoded,
        given.shares,
        None if given.grammar is None else compile(given.grammar),
        decoded(given.cache_salt),
        given.map_order,
    )


def output(given: StepOutput) -> Output:
    """A step's output as it passes."""
    outcome, length = given.outcome, 0
    if outcome is not None:
        length = len(outcome.prompt)
        outcome = RequestOutcome(**{**vars(outcome), "prompt": []})
    return Output(
        given.request_id,
        given.new_text,
        given.new_tokens,
        given.prefilled,
        given.prefill_total,
        given.new_logprobs,
        length,
        outcome,
    )


def step_output(given: Output, prompt: list[int]) -> StepOutput:
    """The output of :func:`output`. ``prompt``: of the request, whose end its turn appended."""
    if given.outcome is not None and given.prompt:
        given.outcome.prompt = prompt[-given.prompt :]
    return StepOutput(
        given.request_id,
        given.text,
        given.tokens,
        given.prefilled,
        given.prefill_total,
        given.outcome,
        given.logprobs,
    )


def told(error: BaseException) -> tuple[str, str]:
    """An error as it passes."""
    if isinstance(error, SaccadeError):
        return type(error).__name__, str(error)
    return "", f"{type(error).__name__}: {error}"


def raised(error: tuple[str, str]) -> Exception:
    """The error of :func:`told`; RuntimeError for one that no user causes."""
    name, message = error
    kind = getattr(errors, name, None) if name else None
    known = isinstance(kind, type) and issubclass(kind, SaccadeError)
    return kind(message) if known else RuntimeError(message)  # type: ignore[misc]


def config_dict(config: EngineConfig) -> dict[str, Any]:
    """An engine's settings as JSON has them."""
    plain = {one.name: getattr(config, one.name) for one in fields(config)}
    return {
        name: value if value is None or isinstance(value, (bool, int, float, str)) else _setting(name, value)
        for name, value in plain.items()
    }


_PLAIN = ("name", "eos_token_ids", "max_requests", "device", "layers", "heads", "session_shared")


def about_dict(about: About) -> dict[str, Any]:
    return {
        **{name: getattr(about, name) for name in _PLAIN},
        "path": str(about.path),
        "policy": about.policy.text,
        "defaults": _params(about.defaults),
        "limits": about.limits,
    }


def about_of(given: dict[str, Any]) -> About:
    changed = {
        "path": Path(given["path"]),
        "policy": Policy.parse(given["policy"]),
        "defaults": _params_of(given["defaults"]),
        "limits": PromptLimits(**given["limits"]),
        "eos_token_ids": tuple(given["eos_token_ids"]),
    }
    return About(**{**given, **changed})


def _setting(name: str, value: Any) -> str:
    return value.text if isinstance(value, Policy) else str(value).removeprefix("torch.")


def _params(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    given = {name: value for name, usual in _USUAL.items() if (value := getattr(params, name)) != usual}
    for name in _TEXTS:
        if name in given:
            given[name] = [encoded(text) for text in given[name]]
    if "stop_token_ids" in given:  # one that no machine word holds never comes
        given["stop_token_ids"] = [token for token in given["stop_token_ids"] if abs(token) < 2**63]
    return given


def _params_of(given: dict[str, Any]) -> SamplingParams:
    for name in _TEXTS:
        if name in given:
            given[name] = tuple(decoded(text) for text in given[name])
    return SamplingParams(**given)


_USUAL = vars(SamplingParams())
_policy = lru_cache(256)(Policy.parse)


def encoded(text: str) -> bytes:
    """Text that a client wrote, as it passes."""
    return text.encode("utf-8", "surrogatepass")


def decoded(given: bytes) -> str:
    """The text again."""
    return given.decode("utf-8", "surrogatepass")
