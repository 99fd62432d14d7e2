"""The only functions of kernels that read and write pools of keys and values: they say how a stored row becomes
numbers, and numbers a stored row (kv/row_formats.py).

``row``: numbers of ``common.pool_rows``, int64; ``channel``: int32; ``there``: which rows to read, bool, or None where
all lie in the pool. They broadcast. Rows that are not ``there`` come as 0, and so do channels from ``D`` on. Rows that
were gathered in one piece are read in the same way. ``TYPE``: of what comes of coded rows, ``kv_dtype="fp8"``; plain
rows come as they are.

Where products take the time, code_products.py multiplies codes and scales sums. Scales are powers of two and codes have
four binary digits, so that numbers are the same in 16 bits as in 32, and so is a sum of products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from saccade.ops.triton.row_codes import e4m3_codes, e4m3_numbers, e4m3_pairs, int8_codes, int8_halves, int8_pairs

MORE: tl.constexpr = tl.constexpr(8)  # bytes of an e4m3 row behind its codes, of which 4 are its scale
SCALED: tl.constexpr = tl.constexpr(64)  # channels of an int8 row that share a scale; two scales are a word


@triton.jit
def load_keys(k_pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr):
    """Channels of keys."""
    return _load(k_pool, row, channel, there, D, TYPE)


@triton.jit
def load_values(v_pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr):
    """Channels of values."""
    return _load(v_pool, row, channel, there, D, TYPE)


@triton.constexpr_function
def in_codes(stored, TYPE, LINES):
    """Whether products of ``LINES`` queries of ``TYPE`` multiply codes, as float16, which has them all: of coded rows,
    on GPUs that turn one into the other by an instruction. Of more lines each warp would do so with all of them; there,
    and elsewhere, :func:`load_keys` and :func:`load_values` serve."""
    coded = stored == tl.uint8 or stored == tl.int8
    return coded and TYPE in (tl.float16, tl.bfloat16) and LINES <= 16 and cuda_capability_geq(8, 9)


@triton.constexpr_function
def turned(stored, TYPE, LINES):
    """Whether keys are the rows of products with up to 8 queries, their columns, and values those of what is summed:
    half of a product's 16 rows would be of no query."""
    return LINES <= 8 and in_codes(stored, TYPE, LINES)


@triton.jit
def key_codes(k_pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr, LINES: tl.constexpr):
    """Keys as float16 codes, and by what products with them are to be multiplied, fp32 [rows, 1], where
    :func:`in_codes`; else keys, and 1, of which the compiler makes nothing. Of int8 rows runs of channels that share a
    scale lie one behind the other: [runs, rows, 64], and [runs, rows, 1]; of rows that are not ``there`` scales are 0,
    and codes those of any row, ``row`` being some row of the pool: a mask for each row would take more instructions
    than a tile's products."""
    if in_codes(k_pool.dtype.element_ty, TYPE, LINES):
        if k_pool.dtype.element_ty == tl.uint8:
            codes = _get(k_pool + (row * (D + MORE) + channel), channel, there, D)
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16), _scales(k_pool, row, there, D)
        else:
            RUNS: tl.constexpr = runs_of(D)
            EACH: tl.constexpr = channel.shape[1] // RUNS
            run = tl.arange(0, RUNS)[:, None, None]
            channel = run * EACH + tl.arange(0, EACH)[None, None, :]
            at = row[None] * width_of(tl.int8, D)
            codes = int8_halves(_get(k_pool + (at + channel), channel, None, D))
            return codes, _run_scales(k_pool, at, run, there[None], D)
    else:
        return _load(k_pool, row, channel, there, D, TYPE), tl.full([1, 1], 1.0, tl.float32)


@triton.jit
def value_codes(
    v_pool, row, channel, there, D: tl.constexpr, D_PAD: tl.constexpr, TYPE: tl.constexpr, LINES: tl.constexpr
):
    """As :func:`key_codes`, of values, the even channels and the odd ones apart: two codes are one number of 16 bits,
    for which there are transposed copies out of shared memory. Else values, and nothing that counts. Where
    :func:`turned`, keys are the last dimension of all three."""
    TURNED: tl.constexpr = turned(v_pool.dtype.element_ty, TYPE, LINES)
    if in_codes(v_pool.dtype.element_ty, TYPE, LINES):
        if v_pool.dtype.element_ty == tl.uint8:
            pair = tl.arange(0, D_PAD // 2)[None, :]
            if TURNED:
                row, pair, there = tl.trans(row), tl.trans(pair), tl.trans(there)
            at = (v_pool + row * (D + MORE)).to(tl.pointer_type(tl.uint16)) + pair
            found = _get(at, pair * 2, there, D)
            even, odd = e4m3_pairs(found)
            return even, odd, _scales(v_pool, row, there, D)
        else:
            RUNS: tl.constexpr = runs_of(D)
            EACH: tl.constexpr = D_PAD // RUNS // 2
            run = tl.arange(0, RUNS)[:, None, None]
            pair = run * EACH + tl.arange(0, EACH)[None, None, :]
            at = row[None] * width_of(tl.int8, D)
            there = there[None]
            if TURNED:
                at, pair, there = tl.trans(at, 0, 2, 1), tl.trans(pair, 0, 2, 1), tl.trans(there, 0, 2, 1)
            found = _get((v_pool + at).to(tl.pointer_type(tl.uint16)) + pair, pair * 2, None, D)
            even, odd = int8_pairs(found)
            return even, odd, _run_scales(v_pool, at, run, there, D)
    else:
        none = tl.full([1, 1], 1.0, tl.float32)
        return _load(v_pool, row, channel, there, D, TYPE), none, none


@triton.constexpr_function
def runs_of(D):
    """Runs of channels of an int8 row that share a scale, a power of two."""
    runs = 1
    while runs * SCALED.value < D:
        runs *= 2
    return runs


@triton.jit
def _run_scales(pool, at, run, there, D: tl.constexpr):
    """Scales of int8 rows [1, rows, 1]: fp32 [runs, rows, 1]. Two are one word, which copies take at once."""
    begin = (pool + (at + D)).to(tl.pointer_type(tl.int32)) + run // 2
    both = _get(begin, run * SCALED, there, D)
    return tl.where(run % 2 == 0, both << 16, both & -65536).to(tl.float32, bitcast=True)


@triton.constexpr_function
def width_of(stored, D):
    """Elements of a stored row: RowFormat.width in kv/row_formats.py."""
    if stored == tl.uint8:
        return D + MORE.value
    if stored == tl.int8:
        return D + 4 * -(-D // (2 * SCALED.value))
    return D


@triton.jit
def load_stored(pool, row, channel, there, WIDTH: tl.constexpr):
    """Elements of rows as they lie in the pool."""
    return _get(pool + (row * WIDTH + channel), channel, there, WIDTH)


@triton.jit
def put_stored(pool, row, channel, elements, there, WIDTH: tl.constexpr):
    """Write ``elements`` to where :func:`load_stored` finds them."""
    _put(pool + (row * WIDTH + channel), elements, channel, there, WIDTH)


@triton.jit
def store_rows(pool, row, channel, values, there, D: tl.constexpr):
    """Write whole rows, 0 from channel ``D`` on, to where :func:`load_keys` and :func:`load_values` find them. Returns
    what these will read, of coded rows in the type of ``values``."""
    if pool.dtype.element_ty == tl.uint8:
        return _store_e4m3(pool, row, channel, values, there, D)
    elif pool.dtype.element_ty == tl.int8:
        return _store_int8(pool, row, channel, values, there, D)
    else:
        values = values.to(pool.dtype.element_ty)
        _put(pool + (row * D + channel), values, channel, there, D)
        return values


@triton.jit
def _store_e4m3(pool, row, channel, values, there, D: tl.constexpr):
    wide = values.to(tl.float32)
    axis: tl.constexpr = len(wide.shape) - 1
    codes, scale = e4m3_codes(wide)
    at = row * (D + MORE)
    _put(pool + (at + channel), codes.to(tl.uint8), channel, there, D)
    tail = (pool + (at + D)).to(tl.pointer_type(tl.float32))
    if axis == 0:
        scale = tl.sum(scale, 0)
    tl.store(tail, scale, mask=there)
    tl.store(tail + 1, tl.zeros(scale.shape, tl.float32) if axis else 0.0, mask=there)
    return (e4m3_numbers(codes) * scale).to(values.dtype)


@triton.jit
def _store_int8(pool, row, channel, values, there, D: tl.constexpr):
    axis: tl.constexpr = len(values.shape) - 1
    WIDTH: tl.constexpr = values.shape[axis]
    RUNS: tl.constexpr = runs_of(D)
    EACH: tl.constexpr = WIDTH // RUNS
    ROWS: tl.constexpr = values.shape[0] if axis else 1
    wide = tl.reshape(values.to(tl.float32), [ROWS, RUNS, EACH])
    codes, bits = int8_codes(wide)
    numbers = codes * bits.to(tl.float32, bitcast=True)
    words = tl.reshape(bits >> 16, [ROWS, RUNS])
    run = tl.arange(0, RUNS)[None, :]
    at = row * width_of(pool.dtype.element_ty, D)
    if axis:
        tail = pool + (at + D)
        codes = tl.reshape(codes, values.shape)
        numbers = tl.reshape(numbers, values.shape)
    else:
        tail = tl.reshape(pool + (at + D) + tl.zeros([1], tl.int32), [1, 1])
        codes = tl.reshape(codes, [WIDTH])
        numbers = tl.reshape(numbers, [WIDTH])
    _put(pool + (at + channel), codes.to(tl.int8), channel, there, D)
    tail = tail.to(tl.pointer_type(tl.int16))
    tl.store(tail + run, words.to(tl.int16), mask=there)
    if RUNS == 1:  # the other half of a word
        tl.store(tail + 1, tl.zeros([ROWS, 1], tl.int16), mask=there)
    return numbers.to(values.dtype)


@triton.constexpr_function
def _fills(D):
    """Whether blocks of ``D`` channels have no more: of a power of two from 16 on."""
    return D >= 16 and (D & (D - 1)) == 0


@triton.jit
def _get(at, channel, there, D: tl.constexpr):
    if there is None:
        if _fills(D):
            return tl.load(at)
        else:
            return tl.load(at, mask=channel < D, other=0)
    elif _fills(D):
        return tl.load(at, mask=there, other=0)
    else:
        return tl.load(at, mask=there & (channel < D), other=0)


@triton.jit
def _put(at, values, channel, there, D: tl.constexpr):
    if there is None:
        if _fills(D):
            tl.store(at, values)
        else:
            tl.store(at, values, mask=channel < D)
    elif _fills(D):
        tl.store(at, values, mask=there)
    else:
        tl.store(at, values, mask=there & (channel < D))


@triton.jit
def _load(pool, row, channel, there, D: tl.constexpr, TYPE: tl.constexpr):
    STORED: tl.constexpr = pool.dtype.element_ty
    found = _get(pool + (row * width_of(STORED, D) + channel), channel, there, D)
    if tl.int8 == STORED:
        return (found.to(tl.float32) * _scales_at(pool, row, channel, there, D)).to(TYPE)
    elif tl.uint8 == STORED:
        if cuda_capability_geq(8, 9):
            numbers = found.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            numbers = e4m3_numbers(found)
        return (numbers * _scales(pool, row, there, D)).to(TYPE)
    else:
        return found


@triton.jit
def _scales_at(pool, row, channel, there, D: tl.constexpr):
    """Of int8 rows, each channel's scale: fp32, of the shape that ``row`` and ``channel`` have together."""
    begin = (pool + (row * width_of(pool.dtype.element_ty, D) + D)).to(tl.pointer_type(tl.int32))
    first, scales = _pair(begin, there)
    if D <= SCALED:
        return first
    else:
        scales = tl.where(channel < SCALED, first, scales)
        tl.static_assert(D <= 4 * SCALED, "int8 rows of a GPU have 256 channels at most")
        if D > 2 * SCALED:
            third, fourth = _pair(begin + 1, there)
            scales = tl.where(channel < 2 * SCALED, scales, tl.where(channel < 3 * SCALED, third, fourth))
        return scales


@triton.jit
def _pair(at, there):
    """The two bfloat16 of a word."""
    if there is None:
        both = tl.load(at)
    else:
        both = tl.load(at, mask=there, other=0)
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _scales(pool, row, there, D: tl.constexpr):
    at = (pool + (row * (D + MORE) + D)).to(tl.pointer_type(tl.float32))
    if there is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=there, other=0.0)
