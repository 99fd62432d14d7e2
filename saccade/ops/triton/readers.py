"""The only functions of kernels that read pools of keys and values: they say how a stored row becomes numbers.

``row``: numbers of ``common.pool_rows``, int64; ``channel``: int32; ``there``: bool, or None where all lie in the pool.
They broadcast. What is not ``there`` comes as 0. Rows that were gathered in one piece are read in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_keys(k_pool, row, channel, there, D: tl.constexpr):
    """Channels of keys, in the dtype of the pool."""
    tl.static_assert(k_pool.dtype.element_ty != tl.int8, "kv_dtype='int8' is read on a CPU alone")
    if there is None:
        return tl.load(k_pool + (row * D + channel))
    else:
        return tl.load(k_pool + (row * D + channel), mask=there, other=0.0)


@triton.jit
def load_values(v_pool, row, channel, there, D: tl.constexpr):
    """Channels of values, in the dtype of the pool."""
    tl.static_assert(v_pool.dtype.element_ty != tl.int8, "kv_dtype='int8' is read on a CPU alone")
    if there is None:
        return tl.load(v_pool + (row * D + channel))
    else:
        return tl.load(v_pool + (row * D + channel), mask=there, other=0.0)


@triton.jit
def store_rows(pool, row, channel, values, there, D: tl.constexpr):
    """Write ``values``, of the pool's dtype, to where :func:`load_keys` and :func:`load_values` find them."""
    tl.store(pool + (row * D + channel), values, mask=there)
