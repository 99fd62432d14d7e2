"""From a request's fields to the engine's sampling parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from saccade.engine.sampling.params import SamplingParams
from saccade.errors import SaccadeError, shown
from saccade.server.errors import bad_request, from_saccade
from saccade.server.protocol import Sampling

_SAME = (  # fields whose name and meaning are the engine's own
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "bad_words",
    "skip_special_tokens",
    "prompt_logprobs",
    "audit",
    "audit_steps",
    "target",
    "certify",
    "bounds",
)


def refuse_unsupported(body: Sampling) -> None:
    """400 for a field that asks for what cannot be done."""
    found = body.refused()
    if found is not None:
        name, why = found
        raise bad_request(f"{name}={shown(getattr(body, name))} is not supported: {why}", name, "unsupported_field")


def sampling_params(body: Sampling, defaults: SamplingParams, max_tokens: int | None, **more: Any) -> SamplingParams:
    """The parameters of a request over a model's ``defaults``. 400 for values out of range."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        if not -(2**63) <= body.seed < 2**63:
            raise bad_request(f"seed={shown(body.seed)} must be an integer of 64 bits", "seed")
        given["seed"] = body.seed % 2**63  # the engine's seeds have no sign
    try:
        return replace(defaults, max_tokens=max_tokens, **given, **more)
    except SaccadeError as error:
        raise from_saccade(error) from error
