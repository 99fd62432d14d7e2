"""The only functions of kernels that read and write pools of keys and values: they say how a stored row becomes
numbers, and numbers a stored row (kv/row_formats.py).

``row``: numbers of ``common.pool_rows``, int64; ``channel``: int32; ``there``: which rows to read, bool, or None where
all lie in the pool. They broadcast. Rows that are not ``there`` come as 0, and so do channels from ``D`` on. Rows that
were gathered in one piece are read in the same way. ``TYPE``: of what comes of coded rows, ``kv_dtype="fp8"``; plain
rows come as they are.

A product may take codes and have its sums scaled (:func:`key_codes`, :func:`value_codes`), which is less work. Scales
are powers of two and codes have four digits, so numbers are the same in 16 bits, and so is a product's sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

MORE: tl.constexpr = tl.constexpr(8)  # bytes of a coded row behind its codes, of which 4 are its scale


@triton.jit
def load_keys(k_pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr):
    """Channels of keys."""
    return _load(k_pool, row, channel, there, D, TYPE)


@triton.jit
def load_values(v_pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr):
    """Channels of values."""
    return _load(v_pool, row, channel, there, D, TYPE)


@triton.jit
def key_codes(k_pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr):
    """Channels of keys, and by what products with them are to be multiplied (fp32, as ``row``); None of plain rows."""
    return _codes(k_pool, row, channel, there, D, TYPE), _scales(k_pool, row, there, D)


@triton.jit
def value_codes(v_pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr):
    """As :func:`key_codes`, of values: what weighs them is to be multiplied. In float16, which has no small numbers,
    weights stay as they are, and values are multiplied."""
    if TYPE == tl.float16:
        return _load(v_pool, row, channel, there, D, TYPE), None
    else:
        return _codes(v_pool, row, channel, there, D, TYPE), _scales(v_pool, row, there, D)


@triton.jit
def scaled(weights, scale):
    """``weights`` [.., rows] times what :func:`key_codes` and :func:`value_codes` say of the rows [rows, 1]."""
    return weights if scale is None else weights * tl.trans(scale)


@triton.jit
def load_stored(pool, row, channel, there, WIDTH: tl.constexpr):
    """Elements of rows as they lie in the pool."""
    at = pool + (row * WIDTH + channel)
    inside = _inside(channel, there, WIDTH)
    return tl.load(at) if inside is None else tl.load(at, mask=inside, other=0)


@triton.jit
def put_stored(pool, row, channel, elements, there, WIDTH: tl.constexpr):
    """Write ``elements`` to where :func:`load_stored` finds them."""
    tl.store(pool + (row * WIDTH + channel), elements, mask=_inside(channel, there, WIDTH))


@triton.jit
def store_rows(pool, row, channel, values, there, D: tl.constexpr):
    """Write whole rows, 0 from channel ``D`` on, to where :func:`load_keys` and :func:`load_values` find them. Returns
    what these will read, of coded rows in the type of ``values``."""
    inside = _inside(channel, there, D)
    if pool.dtype.element_ty != tl.uint8:
        values = values.to(pool.dtype.element_ty)
        tl.store(pool + (row * D + channel), values, mask=inside)
        return values
    else:
        wide = values.to(tl.float32)
        size = tl.abs(wide)
        axis: tl.constexpr = len(wide.shape) - 1
        largest = tl.max(size, axis, keep_dims=True)
        broken = tl.max((size < float("inf")).to(tl.int32) == 0, axis, keep_dims=True) != 0
        # 448 is 1.75 * 2^8: beyond a mantissa of 1.75 the carry takes the next power.
        exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        codes = _rounded(tl.where(broken, 0.0, wide * inverse))
        scale = tl.where(broken, float("nan"), scale)
        at = row * (D + MORE)
        tl.store(pool + (at + channel), codes.to(tl.uint8), mask=inside)
        tail = (pool + (at + D)).to(tl.pointer_type(tl.float32))
        if axis == 0:
            scale = tl.sum(scale, 0)
        tl.store(tail, scale, mask=there)
        tl.store(tail + 1, tl.zeros(scale.shape, tl.float32) if axis else 0.0, mask=there)
        return (_numbers(codes) * scale).to(values.dtype)


@triton.jit
def _inside(channel, there, D: tl.constexpr):
    """Which elements to read; None: all. Of a power of two from 16 on no block of channels has more."""
    if D >= 16 and (D & (D - 1)) == 0:
        return there
    elif there is None:
        return channel < D
    else:
        return there & (channel < D)


@triton.jit
def _load(pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr):
    codes = _codes(pool, row, channel, there, D, tl.float32 if pool.dtype.element_ty == tl.uint8 else TYPE)
    if pool.dtype.element_ty == tl.uint8:
        return (codes * _scales(pool, row, there, D)).to(TYPE)
    else:
        return codes


@triton.jit
def _codes(pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr):
    tl.static_assert(pool.dtype.element_ty != tl.int8, "kv_dtype='int8' is read on a CPU alone")
    CODED: tl.constexpr = pool.dtype.element_ty == tl.uint8
    WIDTH: tl.constexpr = D + MORE if CODED else D
    inside = _inside(channel, there, D)
    at = pool + (row * WIDTH + channel)
    if inside is None:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=inside, other=0)
    if CODED:
        if cuda_capability_geq(8, 9):
            return found.to(tl.float8e4nv, bitcast=True).to(TYPE)
        else:
            return _numbers(found).to(TYPE)
    else:
        return found


@triton.jit
def _scales(pool, row, there, D: tl.constexpr):
    if pool.dtype.element_ty != tl.uint8:
        return None
    else:
        at = (pool + (row * (D + MORE) + D)).to(tl.pointer_type(tl.float32))
        if there is None:
            return tl.load(at)
        else:
            return tl.load(at, mask=there, other=0.0)


@triton.jit
def _numbers(codes):
    """What codes stand for, fp32; for GPUs that do not know the type, and an interpreter."""
    bits = codes.to(tl.int32)
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return moved.to(tl.float32, bitcast=True) * 1.3292279957849159e36  # 2^120, between the two exponents' zeros


@triton.jit
def _rounded(values):
    """The codes, int32, nearest to fp32 ``values`` of at most 448, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(values) * 512.0 + 12582912.0) - 12582912.0
    return tl.where(size < (121 << 23), small.to(tl.int32), normal) | ((bits >> 24) & 0x80)
