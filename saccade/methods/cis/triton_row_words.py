"""How the kernels of CIS's recorded steps find what a row's state holds: its words and reals (recorded.py packs
them)."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.methods.cis.recorded import Reals, Words
from saccade.methods.triton_topk import budget_of
from saccade.ops.triton.state_words import places

W, R = places(Words), places(Reals)


@triton.jit
def place_of(own, length):
    """Which step of its block a row is at, from 0."""
    step = length.to(tl.int64) - 1 - tl.load(own + W.begins)
    return step.to(tl.int32) % tl.load(own + W.steps).to(tl.int32)


@triton.jit
def budget_at(own, reals, length):
    """How many keys a row of ``length`` keys retrieves."""
    return budget_of(tl.minimum(tl.load(own + W.k), 1 << 30).to(tl.int32), tl.load(reals + R.k), length)
