"""What several ranks serve (engine/ranks/worker.py), checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from saccade.engine.sampling.params import SamplingParams
from saccade.errors import PolicyError, RequestError, SaccadeError, shown
from saccade.methods.base import Method
from saccade.methods.outside import in_this_process_alone
from saccade.methods.policy import Policy
from saccade.methods.verified import Verified

# Settings that they do not serve, with the value that these must have.
LEFT_OUT: dict[str, Any] = {
    "max_token_gap": None,
    "audit": 0,
    "audit_steps": 0,
    "target": None,
}
OF_REQUESTS = ("audit", "audit_steps", "target", "certify", "bounds")


def check_settings(config: Mapping[str, Any]) -> None:
    """SaccadeError for settings of an engine, by name, that do not go with several ranks."""
    ranks: int = config["tensor_parallel_size"]
    if ranks == 1:
        return
    given = {name: config[name] for name, needed in LEFT_OUT.items() if config[name] != needed}
    if config["kv_memory"] == "profile":
        given["kv_memory"] = "profile"
    for name, value in given.items():
        raise SaccadeError(
            f"{name}={shown(value)} does not go with tensor_parallel_size={ranks} yet; leave {name} out, or give "
            "tensor_parallel_size=1"
        )
    check_policy(ranks, Policy.parse(config["policy"]))


def check_policy(ranks: int, policy: Policy) -> None:
    """PolicyError for what a process cannot choose for its heads alone; what is settled later is checked then."""
    if ranks > 1 and not policy.deferred and (reason := why_not(policy)) is not None:
        raise PolicyError(
            f"policy={shown(policy.text)} does not go with tensor_parallel_size={ranks}: {reason}; "
            "give another method, or tensor_parallel_size=1"
        )


def why_not(policy: Policy) -> str | None:
    """Why processes that have some of a model's heads each cannot run ``policy``; None where they can."""
    reasons = ((part.name, _joins(part)) for part in (policy.prefill, policy.decode))
    return next((f"of {name}, {reason}" for name, reason in reasons if reason), None)


def _joins(method: Method) -> str | None:
    """What of other processes' heads a choice of ``method`` hangs on, or of one inside it."""
    if in_this_process_alone(method.name):
        return "it is registered in this process alone (an entry point, or SACCADE_METHODS_FROM, shows it to all)"
    if isinstance(method, Verified):
        return "drafts are chosen and checked in one process"
    if getattr(method, "unit", None) == "layer":
        return "all heads of a layer read the same blocks (unit='kv_head' lets each KV head choose)"
    inner = [value for field in fields(method) if isinstance(value := getattr(method, field.name), Method)]
    return method.joins_heads or next((why for one in inner if (why := _joins(one)) is not None), None)


def check_request(ranks: int, params: SamplingParams, maps: bool) -> None:
    """RequestError for what looks at attention, of which a rank has some heads alone."""
    given = [name for name in OF_REQUESTS if getattr(params, name)]
    given += ["a selection map"] if maps else []
    if ranks > 1 and given:
        raise RequestError(
            f"{given[0]} looks at all heads, of which tensor_parallel_size={ranks} leaves a part to each process; ask "
            "without it, or use tensor_parallel_size=1"
        )
