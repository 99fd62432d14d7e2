"""The engine's messages, outputs, settings and errors in the forms in which they pass (wire.py), and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from saccade import errors
from saccade.engine.messages import AddRequest, RequestOutcome, StepOutput
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.sampling.steering import Constraint
from saccade.engine.settings.checks import PromptLimits
from saccade.engine.settings.config import EngineConfig
from saccade.errors import SaccadeError, class_name
from saccade.methods.policy import Policy
from saccade.server import wire
from saccade.server.engines import About

_TEXTS = ("stop", "bad_words")


def request(message: AddRequest) -> wire.Request:
    """A message as it passes. Its constraint has a ``source`` and a ``name``."""
    constraint: Any = message.constraint
    return wire.Request(
        message.request_id,
        message.prompt,
        _params(message.params),
        message.policy.text,
        message.session,
        message.keep,
        message.whole,
        message.decoded,
        message.shares,
        None if constraint is None else (constraint.source, constraint.name),
        encoded(message.cache_salt),
        message.map_order,
    )


def add_request(given: wire.Request, compile: Callable[[str, str], Constraint]) -> AddRequest:
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
        None if given.grammar is None else compile(*given.grammar),
        decoded(given.cache_salt),
        given.map_order,
    )


def output(given: StepOutput) -> wire.Output:
    """A step's output as it passes."""
    outcome, length = given.outcome, 0
    if outcome is not None:
        length = len(outcome.prompt)
        outcome = RequestOutcome(**{**vars(outcome), "prompt": []})
    return wire.Output(
        given.request_id,
        given.new_text,
        given.new_tokens,
        given.prefilled,
        given.prefill_total,
        given.new_logprobs,
        length,
        outcome,
        given.cached,
        given.kept,
    )


def step_output(given: wire.Output, prompt: list[int]) -> StepOutput:
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
        given.cached,
        given.kept,
    )


def told(error: BaseException) -> tuple[str, str]:
    """An error as it passes."""
    if isinstance(error, SaccadeError):
        return class_name(error) or "", str(error)
    return "", f"{type(error).__name__}: {error}"


def raised(error: tuple[str, str]) -> Exception:
    """The error of :func:`told`; RuntimeError for one that no user causes."""
    name, message = error
    return getattr(errors, name)(message) if errors.is_of(name, SaccadeError) else RuntimeError(message)


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
