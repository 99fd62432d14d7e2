"""What several ranks serve (engine/ranks/worker.py), checked before anything runs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from saccade.engine.ranks.reduce import shares_gpus
from saccade.engine.sampling.params import SamplingParams
from saccade.errors import PolicyError, RequestError, SaccadeError, shown
from saccade.methods.base import Method
from saccade.methods.policy import Policy
from saccade.methods.verified import Verified
from saccade.models.target import checked_device

if TYPE_CHECKING:
    from saccade.engine.settings.config import EngineConfig

# Settings that they do not serve, with the value that these must have.
LEFT_OUT: dict[str, Any] = {
    "max_token_gap": None,
}


def check_config(config: EngineConfig) -> None:
    """SaccadeError for settings that do not go with several ranks."""
    ranks = config.tensor_parallel_size
    if ranks == 1:
        return
    given = {name: getattr(config, name) for name, needed in LEFT_OUT.items() if getattr(config, name) != needed}
    if config.kv_memory == "profile":
        given["kv_memory"] = config.kv_memory
    for name, value in given.items():
        raise SaccadeError(
            f"{name}={shown(value)} does not go with tensor_parallel_size={ranks} yet; leave {name} out, or give "
            "tensor_parallel_size=1"
        )
    tiered = config.kv_host is not None or config.kv_disk is not None
    check_policy(ranks, Policy.parse(config.policy), tiered, str(config.device).startswith("cuda"))


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """Where a rank computes: on GPUs from the first rank's on, of those that CUDA_VISIBLE_DEVICES leaves."""
    device = checked_device(config.device)
    if device.type != "cuda" or config.tensor_parallel_size == 1:
        return device
    place = (device.index or 0) + rank
    return torch.device("cuda", place % torch.cuda.device_count() if shares_gpus() else place)


def check_devices(config: EngineConfig) -> None:
    """SaccadeError where a rank finds no GPU here."""
    ranks, device = config.tensor_parallel_size, checked_device(config.device)
    if ranks == 1 or device.type != "cuda" or shares_gpus():
        return
    first, there = device.index or 0, torch.cuda.device_count()
    if first + ranks > there:
        raise SaccadeError(
            f"tensor_parallel_size={ranks} takes the GPUs {first} to {first + ranks - 1}; torch sees {there} of them "
            "(CUDA_VISIBLE_DEVICES): give fewer, or device='cpu'"
        )


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
