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
    "audit": 0,
    "audit_steps": 0,
    "target": None,
}
OF_REQUESTS = ("audit", "audit_steps", "target", "certify", "bounds")


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
    check_policy(ranks, Policy.parse(config.policy))


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
