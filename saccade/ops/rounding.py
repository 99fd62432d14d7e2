"""What stored keys and values may differ by from those that were rounded to them, and what that may do to attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.kv.view import KVView


def attention_error(q: Tensor, kv: KVView, kv_head: int, scale: float) -> float:
    """At most so far is the attention of one KV head's queries ``q`` [group, head_dim] over what is stored from that
    over keys and values before they were rounded, over the sum of weight times norm of value: the greatest of the
    group; inf where nothing is known. 0 for rows that are not rounded.

    A logit is off by at most d, the sum over channels of |q| times half a step, so that no weight changes by more than
    a factor exp(2 d); a value is off by its rounding's norm, at most the share r of its own: exp(2 d) (1 + r) - 1. A
    cap brings logits nearer to each other.
    """
    keys, values = (part[kv_head] for part in kv.stored())
    steps, value_steps = kv.format.k.step(keys, kv.dtype), kv.format.v.step(values, kv.dtype)
    if steps is None or value_steps is None:
        return 0.0
    half = steps.amax(0) / 2  # by channel
    off = float((q.float().abs() @ half).amax()) * abs(scale)
    rounded = (value_steps.double() / 2).norm(dim=-1)  # squares of small numbers are none in float32
    share = rounded / kv.format.decode(values, kv.format.v).double().norm(dim=-1)
    worst = float(torch.where(rounded > 0, share, 0.0).amax())
    return math.exp(2 * off) * (1 + worst) - 1 if 2 * off < 700 and worst < math.inf else math.inf
