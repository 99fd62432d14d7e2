"""Codes of weights in tiles (``ops.tile_weights``) as operands of the tensor cores.

They become 16-bit floats without a conversion: their bits are those of a mantissa below a fixed exponent, from which a
constant is taken (Kim et al., "Who Says Elephants Can't Run", 2022, section 4). Each is an integer, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def assembly(bits, more, shift, more_shift, zero, magic):
    """PTX (sm_80 and later) that makes two operands $0 of the words $1, and $2 with further bits: codes less ``zero``,
    which is 128 where they have 8 bits."""
    kind, one = ("bf16x2", 0x3F80) if magic == 0x4300 else ("f16x2", 0x3C00)
    whole = bits == 8 and magic == 0x4300  # an eighth bit is none of a bfloat16's mantissa

    def both(value):
        return f"0x{value << 16 | value:08X}"

    lines = [f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"]
    if whole:  # 256 is taken off, or 128 where the bit is set: these two floats differ in one bit
        lines += ["and.b32 h, t, 0x00800080;", "xor.b32 h, h, 0xC380C380;"]
    else:  # the magic float with the zero in its mantissa, negative
        lines += [f"mov.b32 h, {both(magic + zero | 0x8000)};"]
    lines += [f"lop3.b32 t, t, {both(127 if whole else (1 << bits) - 1)}, {both(magic)}, 0xEA;"]  # (a & b) | c
    if more:
        turned = f"shl.b32 m, $2, {4 - more_shift};" if more_shift < 4 else f"shr.u32 m, $2, {more_shift - 4};"
        lines += [turned, f"and.b32 m, m, {both(((1 << more) - 1) << 4)};", "or.b32 t, t, m;"]
    lines += [f"mov.b32 o, {both(one)};", f"fma.rn.{kind} $0, t, o, h;"]
    return "{ .reg .b32 t, h, m, o; " + " ".join(lines) + " }"


@triton.jit
def integers(
    word, further, SHIFT: tl.constexpr, MORE_SHIFT: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """int32: codes less their zero."""
    codes = word.to(tl.int32) >> SHIFT & ((1 << BITS) - 1)
    if MORE:
        codes = codes | (further.to(tl.int32) >> MORE_SHIFT & ((1 << MORE) - 1)) << 4
    return codes - ZERO


@triton.jit
def operand(
    word, further, SHIFT: tl.constexpr, MORE_SHIFT: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr,
    ZERO: tl.constexpr, MAGIC: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """The same in the dtype ``kind`` of the activations."""
    if MAGIC == 0:
        return integers(word, further, SHIFT, MORE_SHIFT, BITS, MORE, ZERO).to(kind)
    elif MAGIC == 0x4300:
        return _assembled(word, further, SHIFT, MORE_SHIFT, BITS, MORE, ZERO, MAGIC, tl.bfloat16)
    else:
        return _assembled(word, further, SHIFT, MORE_SHIFT, BITS, MORE, ZERO, MAGIC, tl.float16)


@triton.jit
def _assembled(
    word, further, SHIFT: tl.constexpr, MORE_SHIFT: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr,
    ZERO: tl.constexpr, MAGIC: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    asm: tl.constexpr = assembly(BITS, MORE, SHIFT, MORE_SHIFT, ZERO, MAGIC)
    if MORE:
        return tl.inline_asm_elementwise(asm, "=r,r,r", [word, further], KIND.value, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(asm, "=r,r", [word], KIND.value, is_pure=True, pack=2)
