"""Codes of 8 bits and the numbers that they stand for, apart from where rows lie: kv/row_formats.py in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def int8_codes(wide):
    """Values fp32 [rows, runs, channels]: the codes of an int8 row, fp32, and the bfloat16 of which a run's codes are
    multiples, as the bits of a float32, int32 [rows, runs, 1]."""
    size = tl.abs(wide)
    largest = tl.max(size, 2, keep_dims=True)
    broken = tl.max(tl.where(size < float("inf"), 0, 1), 2, keep_dims=True) > 0
    bits = tl.div_rn(tl.where(broken, 0.0, largest), tl.full(largest.shape, 127.0, tl.float32))
    bits = bits.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536  # the nearest bfloat16
    scale = bits.to(tl.float32, bitcast=True)
    ratio = tl.div_rn(tl.where(broken, 0.0, wide), tl.zeros(wide.shape, tl.float32) + tl.where(bits > 0, scale, 1.0))
    codes = (tl.minimum(tl.maximum(ratio, -127.0), 127.0) + 12582912.0) - 12582912.0
    codes = tl.where(bits > 0, codes, 0.0)
    bits = tl.where(broken, 0x7FC00000, bits)
    return codes, bits


@triton.jit
def int8_halves(codes):
    """int8 codes as float16: in the mantissa of 1024, less 1152."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 moved, low, high, zero;
        mov.b32 zero, 0x64806480;
        xor.b32 moved, $2, 0x80808080;
        prmt.b32 low, moved, 0x64646464, 0x4140;
        prmt.b32 high, moved, 0x64646464, 0x4342;
        sub.f16x2 $0, low, zero;
        sub.f16x2 $1, high, zero;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def int8_pairs(pairs):
    """Two int8 codes each, uint16: the lower ones as float16, and the higher ones."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 moved, low, high, zero;
        mov.b32 zero, 0x64806480;
        xor.b32 moved, $2, 0x80808080;
        prmt.b32 low, moved, 0x64646464, 0x4240;
        prmt.b32 high, moved, 0x64646464, 0x4341;
        sub.f16x2 $0, low, zero;
        sub.f16x2 $1, high, zero;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def e4m3_pairs(pairs):
    """Two e4m3 codes each, uint16: the lower ones as float16, and the higher ones."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 both;
        .reg .b16 low, high;
        prmt.b32 both, $2, 0, 0x3120;
        mov.b32 {low, high}, both;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def e4m3_codes(wide):
    """Rows of values, fp32 [..., channels]: their codes, int32, and the power of two, fp32 [..., 1], of which these are
    multiples."""
    axis: tl.constexpr = len(wide.shape) - 1
    size = tl.abs(wide)
    largest = tl.max(size, axis, keep_dims=True)
    broken = tl.max(tl.where(size < float("inf"), 0, 1), axis, keep_dims=True) > 0
    # 448 is 1.75 * 2^8: beyond a mantissa of 1.75 the carry takes the next power.
    exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = _rounded(tl.where(broken, 0.0, wide * inverse))
    scale = tl.where(broken, float("nan"), scale)
    return codes, scale


@triton.jit
def e4m3_numbers(codes):
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
