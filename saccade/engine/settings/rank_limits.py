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
}


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
    tiered = config["kv_host"] is not None or config["kv_disk"] is not None
    check_policy(ranks, Policy.parse(config["policy"]), tiered, str(config["device"]).startswith("cuda"))


def check_policy(ranks: int, policy: Policy, tiered: bool = False, on_gpu: bool = False) -> None:
    """PolicyError for what a process cannot choose for its heads alone; what is settled later is checked then."""
    if ranks > 1 and not policy.deferred and (reason := why_not(policy, tiered, on_gpu)) is not None:
        raise PolicyError(
            f"policy={shown(policy.text)} does not go with tensor_parallel_size={ranks}: {reason}; "
            "give another method, or tensor_parallel_size=1"
        )


def why_not(policy: Policy, tiered: bool = False, on_gpu: bool = False) -> str | None:
    """Why processes that have some of a model's heads each cannot run ``policy``, ``tiered`` over host memory or a
    disk; None where they can."""
    where = "on GPUs steps are recorded" if on_gpu else None
    where = "over kv_host or kv_disk processes attend requests in orders of their own" if tiered else where
    reasons = ((part.name, _joins(part, where)) for part in (policy.prefill, policy.decode))
    return next((f"of {name}, {reason}" for name, reason in reasons if reason), None)


def _joins(method: Method, where: str | None) -> str | None:
    """Why processes cannot run ``method``, or one inside it. ``where``: why nothing is asked of others between
    layers."""
    if in_this_process_alone(method.name):
        return "it is registered in this process alone (an entry point, or SACCADE_METHODS_FROM, shows it to all)"
    if where is not None and isinstance(method, Verified):
        return f"drafted rows are taken one by one, and {where}"
    if where is not None and method.joins_heads:
        return f"heads choose together, and {where}"
    inner = [value for field in fields(method) if isinstance(value := getattr(method, field.name), Method)]
    return method.one_process or next((why for one in inner if (why := _joins(one, where)) is not None), None)


def check_request(ranks: int, params: SamplingParams, policy: Policy) -> None:
    """RequestError for what rests on more heads than a rank has."""
    if ranks > 1 and params.bounds and policy.freeze is not None:
        raise RequestError(
            f"bounds={params.bounds:g} of '{policy.freeze.text}' are fitted to the keys of all heads, of which "
            f"tensor_parallel_size={ranks} leaves a part to each process; ask without them, or use "
            "tensor_parallel_size=1"
        )
