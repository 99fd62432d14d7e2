"""The draws of :mod:`saccade.randomness` inside a kernel: the same words, and so the same numbers, as on the host."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(seed, sample, position):
    """Integers from 0 to 2^63 - 1, scalars or blocks -> float64 in [0, 1), equal to ``saccade.randomness.uniform``."""
    seed, sample, position = tl.cast(seed, tl.int64), tl.cast(sample, tl.int64), tl.cast(position, tl.int64)
    high, low, _, _ = tl.philox(
        seed,
        (position & 0xFFFFFFFF).to(tl.uint32),
        (position >> 32).to(tl.uint32),
        (sample & 0xFFFFFFFF).to(tl.uint32),
        (sample >> 32).to(tl.uint32),
    )
    whole = (high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)
    return whole.to(tl.float64) * 1.1102230246251565e-16  # 2^-53
