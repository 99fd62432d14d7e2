"""Attention's two products over rows of readers.key_codes and readers.value_codes: of codes, where kernels multiply
these (``readers.in_codes``), else of numbers as they are. Sums are float32 in both.

Codes are multiplied as float16. Queries are scaled to its range by powers of two. A key's scale comes after the
product. A value's goes into its weight, as multiples of the greatest scale so far: weights are 32768 at most, since
float16 has no small numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kv.row_formats import format_of
from saccade.ops.triton.common import pad
from saccade.ops.triton.readers import in_codes, runs_of, turned

LEAST: tl.constexpr = tl.constexpr(7.888609052210118e-31)  # 2^-100, of grains
ROOM: tl.constexpr = tl.constexpr(32768.0)


def lines_for(queries: int, pool: Tensor, dtype: torch.dtype) -> int:
    """Rows of a product that ``queries`` of ``dtype`` over keys of ``pool`` are padded to."""
    return pad(queries, 8 if dtype != torch.float32 and format_of(pool, dtype).coded else 16)


@triton.jit
def queries(q, k_pool, D: tl.constexpr):
    """``q`` [rows, D] as :func:`products` takes it, and by what its products are to be multiplied, fp32 [rows, 1]."""
    if in_codes(k_pool.dtype.element_ty, q.dtype, q.shape[0]):
        wide = q.to(tl.float32)
        exponent = tl.max(tl.abs(wide), 1, keep_dims=True).to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        q = (wide * inverse).to(tl.float16)
        if k_pool.dtype.element_ty == tl.int8:
            RUNS: tl.constexpr = runs_of(D)
            q = tl.permute(tl.reshape(q, [q.shape[0], RUNS, q.shape[1] // RUNS]), (1, 0, 2))
        return q, (exponent << 23).to(tl.float32, bitcast=True)
    else:
        return q, tl.full([1, 1], 1.0, tl.float32)


@triton.jit
def products(q, rise, k, k_scale, PRECISION: tl.constexpr):
    """Queries times keys, of :func:`queries` and readers.key_codes: fp32 [rows, keys]."""
    ROWS: tl.constexpr = rise.shape[0]
    if ROWS == 8 and len(k.shape) == 3:
        scores = tl.dot(k, tl.permute(q, (0, 2, 1))) * k_scale
        return tl.trans(tl.sum(scores, 0)) * rise
    elif ROWS == 8:
        return tl.trans(tl.dot(k, tl.trans(q), input_precision=PRECISION) * k_scale) * rise
    elif len(k.shape) == 3:
        scores = tl.dot(q, tl.permute(k, (0, 2, 1))) * tl.permute(k_scale, (0, 2, 1))
        return tl.sum(scores, 0) * rise
    else:
        return tl.dot(q, tl.trans(k), input_precision=PRECISION) * tl.trans(k_scale) * rise


@triton.jit
def no_values(v_pool, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TYPE: tl.constexpr):
    """Sums of no values, which :func:`add_values` adds to: of even channels, of odd ones, and their grain."""
    RUNS: tl.constexpr = runs_of(D)
    if turned(v_pool.dtype.element_ty, TYPE, ROWS):
        if v_pool.dtype.element_ty == tl.int8:
            none = tl.zeros([RUNS, D_PAD // RUNS // 2, ROWS], tl.float32)
        else:
            none = tl.zeros([D_PAD // 2, ROWS], tl.float32)
        return none, none, tl.full([], LEAST, tl.float32)
    elif in_codes(v_pool.dtype.element_ty, TYPE, ROWS):
        if v_pool.dtype.element_ty == tl.int8:
            none = tl.zeros([RUNS, ROWS, D_PAD // RUNS // 2], tl.float32)
        else:
            none = tl.zeros([ROWS, D_PAD // 2], tl.float32)
        return none, none, tl.full([], LEAST, tl.float32)
    else:
        return tl.zeros([ROWS, D_PAD], tl.float32), tl.full([1, 1], 0.0, tl.float32), tl.full([], 1.0, tl.float32)


@triton.jit
def add_values(sums, odd_sums, grain, shrink, weights, v, odd, v_scale, PRECISION: tl.constexpr):
    """Sums times ``shrink`` [rows], and values of readers.value_codes times ``weights`` fp32 [rows, keys]."""
    ROWS: tl.constexpr = weights.shape[0]
    if ROWS == 8 and len(v.shape) == 3:
        highest = tl.maximum(grain, tl.max(tl.max(tl.max(v_scale, 2), 1), 0))
        shrink = (shrink * (grain / highest))[None, None, :]
        weights = (tl.trans(weights)[None] * (tl.permute(v_scale, (0, 2, 1)) * (ROOM / highest))).to(tl.float16)
        sums = tl.dot(v, weights, sums * shrink)
        odd_sums = tl.dot(odd, weights, odd_sums * shrink)
        return sums, odd_sums, highest
    elif ROWS == 8 and odd.shape[0] > 1:
        highest = tl.maximum(grain, tl.max(tl.max(v_scale, 1), 0))
        shrink = (shrink * (grain / highest))[None, :]
        weights = (tl.trans(weights) * (tl.trans(v_scale) * (ROOM / highest))).to(tl.float16)
        sums = tl.dot(v, weights, sums * shrink, input_precision=PRECISION)
        odd_sums = tl.dot(odd, weights, odd_sums * shrink, input_precision=PRECISION)
        return sums, odd_sums, highest
    elif len(v.shape) == 3:
        highest = tl.maximum(grain, tl.max(tl.max(tl.max(v_scale, 2), 1), 0))
        shrink = (shrink * (grain / highest))[None, :, None]
        weights = (weights[None] * (tl.permute(v_scale, (0, 2, 1)) * (ROOM / highest))).to(tl.float16)
        sums = tl.dot(weights, v, sums * shrink)
        odd_sums = tl.dot(weights, odd, odd_sums * shrink)
        return sums, odd_sums, highest
    elif odd.shape[0] > 1:
        highest = tl.maximum(grain, tl.max(tl.max(v_scale, 1), 0))
        shrink = (shrink * (grain / highest))[:, None]
        weights = (weights * (tl.trans(v_scale) * (ROOM / highest))).to(tl.float16)
        sums = tl.dot(weights, v, sums * shrink, input_precision=PRECISION)
        odd_sums = tl.dot(weights, odd, odd_sums * shrink, input_precision=PRECISION)
        return sums, odd_sums, highest
    else:
        return tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION), odd_sums, grain


@triton.jit
def whole(sums, odd_sums, grain):
    """The sums [rows, D_PAD], channels in their order; of 16 rows or more."""
    if len(odd_sums.shape) == 3:
        found = tl.permute(tl.interleave(sums, odd_sums), (1, 0, 2))
        return tl.reshape(found, [sums.shape[1], 2 * sums.shape[0] * sums.shape[2]]) * (grain / ROOM)
    elif odd_sums.shape[0] > 1:
        return tl.interleave(sums, odd_sums) * (grain / ROOM)
    else:
        return sums


@triton.jit
def put_sums(to, sums, odd_sums, grain, factor, mask, D: tl.constexpr, D_PAD: tl.constexpr):
    """Store the sums times ``factor`` [rows] to ``to`` [rows, 1], channels side by side, of rows in ``mask``
    [rows, 1]."""
    ROWS: tl.constexpr = factor.shape[0]
    if ROWS == 8 and len(odd_sums.shape) == 3:
        PAIRS: tl.constexpr = sums.shape[1]
        channel = tl.arange(0, sums.shape[0])[:, None, None] * (2 * PAIRS) + 2 * tl.arange(0, PAIRS)[None, :, None]
        factor = (factor * (grain / ROOM))[None, None, :]
        to, inside = tl.trans(to)[None], tl.trans(mask)[None] & (channel < D)
        tl.store(to + channel, (sums * factor).to(to.dtype.element_ty), mask=inside)
        tl.store(to + channel + 1, (odd_sums * factor).to(to.dtype.element_ty), mask=inside)
    elif ROWS == 8 and odd_sums.shape[0] > 1:
        channel = tl.arange(0, D_PAD // 2)[:, None] * 2
        factor = (factor * (grain / ROOM))[None, :]
        to, inside = tl.trans(to), tl.trans(mask) & (channel < D)
        tl.store(to + channel, (sums * factor).to(to.dtype.element_ty), mask=inside)
        tl.store(to + channel + 1, (odd_sums * factor).to(to.dtype.element_ty), mask=inside)
    elif len(odd_sums.shape) == 3:
        EACH: tl.constexpr = sums.shape[2]
        channel = tl.arange(0, sums.shape[0])[:, None, None] * (2 * EACH) + 2 * tl.arange(0, EACH)[None, None, :]
        factor = (factor * (grain / ROOM))[None, :, None]
        inside = mask[None] & (channel < D)
        tl.store(to[None] + channel, (sums * factor).to(to.dtype.element_ty), mask=inside)
        tl.store(to[None] + channel + 1, (odd_sums * factor).to(to.dtype.element_ty), mask=inside)
    elif odd_sums.shape[0] > 1:
        channel = tl.arange(0, D_PAD // 2)[None, :] * 2
        factor = (factor * (grain / ROOM))[:, None]
        inside = mask & (channel < D)
        tl.store(to + channel, (sums * factor).to(to.dtype.element_ty), mask=inside)
        tl.store(to + channel + 1, (odd_sums * factor).to(to.dtype.element_ty), mask=inside)
    else:
        channel = tl.arange(0, D_PAD)[None, :]
        tl.store(to + channel, (sums * factor[:, None]).to(to.dtype.element_ty), mask=mask & (channel < D))
