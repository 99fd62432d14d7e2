"""How the kernels of CIS's recorded steps find what a row's state holds: its words (recorded.py fills them in)."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.methods.triton_topk import budget_of

# Words of a row: numbers, then addresses.
TURN, STEPS, BY_POSITION, K, SINKS, LOCAL, REACH, BEST, FOLLOW, GAP, ANY = range(11)
DIRECTIONS, HAS, COUNTS, KEYS, POSITIONS, MOVING, CAPACITY, MOST = range(11, 19)
NONE = 2**31 - 1  # behind every position

WORDS = {
    "W_TURN": TURN, "W_STEPS": STEPS, "W_POS": BY_POSITION, "W_K": K, "W_SINKS": SINKS, "W_LOCAL": LOCAL,
    "W_REACH": REACH, "W_BEST": BEST, "W_FOLLOW": FOLLOW, "W_GAP": GAP, "W_ANY": ANY, "W_DIR": DIRECTIONS,
    "W_HAS": HAS, "W_COUNTS": COUNTS, "W_KEYS": KEYS, "W_AT": POSITIONS, "W_MOVING": MOVING, "W_CAP": CAPACITY,
    "W_MOST": MOST,
}  # fmt: skip


@triton.jit
def place_of(own, length, W_TURN: tl.constexpr, W_STEPS: tl.constexpr, W_POS: tl.constexpr):
    """Which step of its block a row is at, from 0."""
    step = length.to(tl.int64) - 1 - tl.load(own + W_TURN)
    step = tl.where(tl.load(own + W_POS) != 0, length.to(tl.int64) - 1, step)
    return step.to(tl.int32) % tl.load(own + W_STEPS).to(tl.int32)


@triton.jit
def budget_at(own, reals, length, W_K: tl.constexpr):
    return budget_of(tl.minimum(tl.load(own + W_K), 1 << 30).to(tl.int32), tl.load(reals + 1), length)
