"""Checks of a stored session: whether this engine can continue it. Every field is checked before anything is made of
it. A checksum only tells that a record is what was written, not that what was written makes sense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.engine.memory.saved_memory import LISTS
from saccade.engine.memory.sequence import Span
from saccade.errors import RequestError, SaccadeError, half_pair, shown, whole_number
from saccade.methods.policy import Policy
from saccade.models.identity import VERSION
from saccade.models.path_identity import is_path_identity, shows_this_model

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel

_PHASES = ("prefill", "decode")


class MalformedSession(RequestError):
    """A stored session that no version has written: its parts are whole, and do not fit each other."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the saved session is malformed: {why}; nothing of it was taken over. Save it again where it still runs, "
            "or remove it"
        )


def require(right: bool, why: str) -> None:
    """MalformedSession, which says ``why``, unless it is ``right``."""
    if not right:
        raise MalformedSession(why)


def check_tokens(tokens: Any, data: Any, vocab_size: int) -> list[int]:
    """The tokens of a session, ids of a vocabulary of that size, as many as its ``data`` says."""
    require(isinstance(tokens, Tensor), "it has no tokens")
    require(
        tokens.dtype == torch.int64 and tokens.dim() == 1,
        f"its tokens are {tokens.dtype} {list(tokens.shape)}, not int64 [tokens]",
    )
    require(isinstance(data, Mapping), f"{shown(data, 60)} is no description of a session")
    count = data.get("tokens")
    require(
        whole_number(count, 0) and count == len(tokens), f"it tells of {shown(count, 40)} tokens and has {len(tokens)}"
    )
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise RequestError(
            f"token {place} of the saved session is {int(tokens[place])}, which is none of this model's: ids are from "
            f"0 to {vocab_size - 1}; use the model that it was saved with"
        )
    return list(tokens.tolist())


def check_model(stored: Any, model: LoadedModel, tokens: int) -> None:
    """RequestError unless a session of so many ``tokens`` was saved with this model."""
    way_out = f"give recompute=True to compute its {tokens} tokens with this one"
    if is_path_identity(stored):
        if shows_this_model(stored, model.runner.model, model.runner.weights):
            return
        raise RequestError(
            "the session was written by a version that identified models by their path and by the version of "
            f"transformers, so it cannot be told whether this is its model; {way_out}, or forget it"
        )
    require(isinstance(stored, Mapping), f"{shown(stored, 60)} names no model")
    if stored.get("version") != VERSION:
        raise RequestError(
            f"the session identifies its model in a way (version {shown(stored.get('version'), 40)}) that this build "
            f"does not know, only version {VERSION}; use the build that saved it, or {way_out}"
        )
    other = model.identity.differences(stored)
    if not other:
        return
    told = f"{' and '.join(other[:4])}{' and more' if len(other) > 4 else ''}"
    if all(one.startswith(("dtype=", "quantize=")) for one in other):
        raise RequestError(
            f"the session was saved with {told}; load the model with the dtype and quantization that it was saved "
            f"with, or {way_out}"
        )
    raise RequestError(f"the session was saved with another model: {told}; {way_out}")


def check_counts(data: Mapping[str, Any], longest: int) -> None:
    """How far a session is computed, and what else is said of it: of at most ``longest`` tokens."""
    tokens = data["tokens"]
    require(whole_number(data.get("chunk"), 1), f"chunk={shown(data.get('chunk'), 40)} is no number of tokens")
    computed: Any = data.get("computed")
    reached: Any = data.get("reached")
    seen: Any = data.get("seen")
    for name, count, least, most in (
        ("reached", reached, 0, tokens),
        ("computed", computed, 0, reached),
        ("seen", seen, reached, max(longest, tokens)),
    ):
        require(whole_number(count, least, most), f"{name}={shown(count, 40)} is not from {least} to {most}")
    for name in ("salt", "note"):
        text = data.get(name)  # a client's salt may be any, half of a surrogate pair too
        right = text is None or (isinstance(text, str) and (name == "salt" or half_pair(text) is None))
        require(right, f"{name}={shown(text, 40)} is no text")
    private = data.get("private", False)
    require(isinstance(private, bool), f"private={shown(private, 40)} is neither true nor false")


def read_spans(data: Mapping[str, Any]) -> list[Span]:
    """How the tokens were computed: stretches that follow each other and cover what was reached."""
    listed: Any = data.get("spans")
    stop = 0
    require(isinstance(listed, list), f"spans={shown(listed, 60)} is no list")
    spans: list[Span] = []
    for one in listed:
        require(isinstance(one, list) and len(one) == 6, f"the span {shown(one, 60)} has not six parts")
        start, end, phase, text, length, cut = one
        where = f"the span {shown(one, 80)}"
        require(whole_number(start, stop, stop), f"{where} does not begin at token {stop}, where the one before ends")
        require(whole_number(end, stop + 1, data["tokens"]), f"{where} does not end within the tokens")
        require(isinstance(phase, str) and phase in _PHASES, f"{where} is of no phase")
        least = end if phase == "prefill" else stop + 1
        require(whole_number(length, least), f"{where} has a length below {least}")
        require(isinstance(cut, bool) and isinstance(text, str), f"{where} has parts of other types")
        try:
            policy = Policy.parse(text)
        except SaccadeError as error:
            raise MalformedSession(f"{where} names a policy that this build does not have: {error}") from None
        if policy.deferred:  # of a version whose `auto` chose behind the prefill: what it chose is not known
            policy = Policy()
        spans.append(Span(start, end, phase, policy, length, cut))
        stop = end
    require(stop >= data["reached"], f"its spans end at token {stop}, before the {data['reached']} that were reached")
    return spans


def check_stored(data: Mapping[str, Any]) -> None:
    """What is said of keys, values and method states, if any are stored."""
    kv: Any = data.get("kv")
    memory: Any = data.get("memory")
    if not data["computed"]:
        require(kv is None, "it has keys and values of tokens that were not computed")
        return
    require(isinstance(kv, Mapping), f"kv={shown(kv, 60)} does not say what its keys and values are")
    length = kv.get("length")
    require(length == data["computed"], f"it has keys of {shown(length, 40)} tokens where {data['computed']} count")
    if "segment" in kv or "sealed" in kv:
        segment, sealed = kv.get("segment"), kv.get("sealed")
        require(whole_number(segment, 1), f"segment={shown(segment, 40)} is no number of tokens")
        right = whole_number(sealed, 0) and sealed == data["computed"] // segment * segment
        require(right, f"sealed={shown(sealed, 40)} is no whole number of segments of {segment} tokens")
    right = isinstance(memory, Mapping) and set(memory) == set(LISTS)
    require(right, f"memory={shown(memory, 60)} does not say what its method knew")
