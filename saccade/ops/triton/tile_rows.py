"""Products of few rows of 16-bit floats with quantised weights in tiles (``ops.tile_weights``) on a GPU of NVIDIA's.

What ``tile_products._product`` computes, written in Gluon, Triton's language of layouts: a thread loads the 16 bytes of
codes that the tensor cores want of it, so that until the warps' sums are added nothing goes through shared memory and
no thread waits for another.

Codes become 16-bit floats without a conversion: their bits are those of a mantissa below a fixed exponent, from which a
constant is taken (Kim et al., "Who Says Elephants Can't Run", 2022, section 4). Each is an integer, exactly.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from saccade.ops.triton.common import interpreted

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2

    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # 3.7 renamed it
except (ImportError, AttributeError):  # it is experimental
    gluon = None

OUTPUTS = 32  # of a program; its warps, if there are more than one, share the channels
KINDS = (torch.bfloat16, torch.float16)


@cache
def _capable(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def serves(x: Tensor) -> bool:
    """Whether the kernel takes such rows."""
    return gluon is not None and not interpreted and x.dtype in KINDS and x.is_cuda and _capable(x.device)


def constants(rows: torch.dtype, scales: torch.dtype) -> dict[str, Any]:
    """What the kernel is told of dtypes. ``MAGIC``: the bits of the float of the rows' kind whose last place is worth
    1."""
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return {
        "MAGIC": 0x4300 if rows == torch.bfloat16 else 0x6400,
        "KIND": kinds[rows],
        "SCALES": kinds[scales],
        "OUTPUTS": OUTPUTS,
    }


class Launch(NamedTuple):
    """``warps`` of a program. Where a block's channels are split among programs: at most as many programs as make
    ``programs`` a processor, each of ``fewest`` turns of its warps at least; at most ``splits``. ``registers`` of a
    thread, at most, where there are at most 8 rows; 0: as many as the compiler likes."""

    warps: int
    programs: int
    fewest: int
    splits: int
    registers: int = 0

    def options(self, rows: int) -> dict[str, int]:
        """Triton's, for so many rows."""
        limit = {"maxnreg": self.registers} if self.registers and rows <= 8 else {}
        return {"num_warps": self.warps, **limit}


LAUNCH = Launch(2, 8, 4, 8, registers=128)  # measured on an H100, by benchmarks/gpu/tiles.py --sweep


@triton.constexpr_function
def assembly(bits, more, shift, zero, magic):
    """PTX (sm_80 and later) that makes two operands $0 of the words $1, and $2 with further bits, which $3 turns to the
    right: codes less ``zero``, which is 128 where they have 8 bits."""
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
        lines += ["shf.r.wrap.b32 m, $2, $2, $3;", f"lop3.b32 t, m, {both(((1 << more) - 1) << 4)}, t, 0xEA;"]
    lines += [f"mov.b32 o, {both(one)};", f"fma.rn.{kind} $0, t, o, h;"]
    return "{ .reg .b32 t, h, m, o; " + " ".join(lines) + " }"


@triton.constexpr_function
def last(number):
    """PTX that makes 2**23 with the byte ``number`` of the word $1 as its last."""
    return f"prmt.b32 $0, $1, 0x4B000000, 0x744{number};"


if gluon is not None:

    @gluon.jit
    def _operand(
        word, further, turn, SHIFT: gl.constexpr, BITS: gl.constexpr, MORE: gl.constexpr, ZERO: gl.constexpr,
        MAGIC: gl.constexpr, KIND: gl.constexpr,
    ):  # fmt: skip
        """Codes of a part less their zero, in the dtype of the rows."""
        asm: gl.constexpr = assembly(BITS, MORE, SHIFT, ZERO, MAGIC)
        if MORE:
            return gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [word, further, turn], KIND.value, is_pure=True, pack=2)
        else:
            return gl.inline_asm_elementwise(asm, "=r,r", [word], KIND.value, is_pure=True, pack=2)

    @gluon.jit
    def _wait(own):
        """``common.begin``, of a kernel launched early."""
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, $1;", "=r,r", [own], gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip

    @gluon.jit
    def _first(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
        """0, 1, ... along the first of three axes."""
        return gl.arange(0, COUNT, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]

    @gluon.jit
    def _second(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
        return gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]

    @gluon.jit
    def _third(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
        return gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]

    @gluon.jit
    def _numbers(at, step, own, BYTES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr, TILE: gl.constexpr):
        """What lies at ``at`` of a step: of an output, numbers of BYTES bytes, one for EACH channels, as two int32, or
        one twice."""
        size: gl.constexpr = max(1, STEP // EACH) * BYTES
        of_step = step // max(1, EACH // STEP) * TILE
        if size == 8:
            both = gl.load(at.to(gl.pointer_type(gl.int64)) + of_step + own)
            first, second = both.to(gl.int32), (both >> 32).to(gl.int32)
        else:
            kind: gl.constexpr = gl.int32 if size == 4 else gl.int16 if size == 2 else gl.uint8
            first = gl.load(at.to(gl.pointer_type(kind)) + of_step + own).to(gl.int32)
            second = first
        return first, second

    @gluon.jit
    def _half(pair, NUMBER: gl.constexpr, KIND: gl.constexpr):
        """float32 of the 16-bit float NUMBER of ``pair``."""
        word = pair[1] if NUMBER >= 2 else pair[0]
        return (word >> 16 * (NUMBER % 2)).to(gl.int16).to(KIND, bitcast=True).to(gl.float32)

    @gluon.jit
    def _byte(word, NUMBER: gl.constexpr):
        """float32 of 2**23 and the byte NUMBER of ``word``, which is its last."""
        asm: gl.constexpr = last(NUMBER)
        return gl.inline_asm_elementwise(asm, "=r,r", [word], gl.float32, is_pure=True, pack=1)

    @gluon.jit
    def _times(number, word, NUMBER: gl.constexpr, SIGNED: gl.constexpr):
        """``number``, of 11 bits, times the byte NUMBER of ``word``, exactly."""
        if SIGNED:
            return number * (_byte(word ^ -2139062144, NUMBER) - 8388736.0)  # of 0x80808080: 128 more than the byte
        else:
            return gl.fma(number, _byte(word, NUMBER), number * -8388608.0)

    @gluon.jit
    def _fetch(
        words, stored, first, limit, place, at_codes, own, at_own, more, scales, least, factors, minima, zeros,
        TILE: gl.constexpr, MORE: gl.constexpr, PART: gl.constexpr, GROUP: gl.constexpr, FACTORS: gl.constexpr,
        LEAST: gl.constexpr, MINIMA: gl.constexpr, ZEROS: gl.constexpr, STEP: gl.constexpr, SPAN: gl.constexpr,
    ):  # fmt: skip
        """All that a step reads of the weights: each warp reads its own, from ``first`` on."""
        of_codes, step = gl.minimum(first + at_codes, limit - 1), gl.minimum(first + at_own, limit - 1)
        word = gl.load(words + of_codes * (TILE * PART) + place, eviction_policy="evict_first")
        further, lows, one, other, own_zeros = word, (own, own), (own, own), (own, own), (own, own)
        if MORE:
            further = gl.load(words + more // 2 + of_codes // (SPAN // STEP) * (TILE * PART) + place)
        if LEAST:
            lows = _numbers(stored + least, step, own, 2, GROUP, STEP, TILE)
        if FACTORS:
            one = _numbers(stored + factors, step, own, 1, PART, STEP, TILE)
        if MINIMA:
            other = _numbers(stored + minima, step, own, 1, PART, STEP, TILE)
        if ZEROS:
            own_zeros = _numbers(stored + zeros, step, own, 1, GROUP, STEP, TILE)
        return word, further, _numbers(stored + scales, step, own, 2, GROUP, STEP, TILE), lows, one, other, own_zeros

    @gluon.jit
    def _add(
        total, held, x_at, first, at_row, at_codes, seen, limit, lane, channels, FULL: gl.constexpr, BITS: gl.constexpr,
        MORE: gl.constexpr, PART: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, SCALES: gl.constexpr,
        FACTORS: gl.constexpr, SIGNED: gl.constexpr, LEAST: gl.constexpr, MINIMA: gl.constexpr, ZEROS: gl.constexpr,
        STEP: gl.constexpr, SPAN: gl.constexpr, MAGIC: gl.constexpr, KIND: gl.constexpr,
    ):  # fmt: skip
        """``total`` with the products of the step of each warp that :func:`_fetch` read."""
        word, further, of_scales, lows, one, other, own_zeros = held
        mma: gl.constexpr = total.type.layout
        none = gl.zeros(total.shape, gl.float32, mma)
        ones = gl.full(word.shape, 1.0, KIND, word.type.layout)
        seen = seen & (first + at_row < limit)
        turn = (first + at_codes) % (SPAN // STEP) * (16 // BITS * MORE)
        for field in gl.static_range(16 // BITS):
            channel = (first + at_row) * STEP + field * PART
            there = seen if FULL else seen & (channel + lane < channels)
            value = gl.load(x_at + channel, mask=there, other=0.0)
            codes = _operand(word, further, turn + (field * MORE - 4) & 31, field * BITS, BITS, MORE, ZERO, MAGIC, KIND)
            scale = _half(of_scales, field * PART // GROUP, SCALES)
            if LEAST:
                off = _half(lows, field * PART // GROUP, SCALES)
            if ZEROS:
                off = scale * (_byte(own_zeros[0], field * PART // GROUP) - (8388608.0 + ZERO))
            if FACTORS:
                scale = _times(scale, one[0], field, SIGNED)
            if MINIMA:
                off = _times(off, other[0], field, False)
            total += mma_v2(codes, value, none) * scale[:, :, None]
            if LEAST or ZEROS:
                total -= mma_v2(ones, value, none) * off[:, :, None]
        return total

    @gluon.jit(do_not_specialize=["rows"])
    def product(
        x, words, stored, bias, out, parts, arrived, rows, outputs, channels, steps, x_row, tile_bytes, more, scales,
        least, factors, minima, zeros, ROWS: gl.constexpr, SPLITS: gl.constexpr, BIASED: gl.constexpr,
        MAGIC: gl.constexpr, KIND: gl.constexpr, FULL: gl.constexpr, TILE: gl.constexpr, OUTPUTS: gl.constexpr,
        BITS: gl.constexpr, MORE: gl.constexpr, PART: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
        SCALES: gl.constexpr, FACTORS: gl.constexpr, SIGNED: gl.constexpr, LEAST: gl.constexpr, MINIMA: gl.constexpr,
        ZEROS: gl.constexpr, STEP: gl.constexpr, SPAN: gl.constexpr, EARLY: gl.constexpr,
    ):  # fmt: skip
        """See ``tile_products._product``. A program's warps take steps in turn; their sums are added in order."""
        warps: gl.constexpr = gl.num_warps()
        mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
        of_codes: gl.constexpr = gl.DotOperandLayout(0, mma, PART // 4)
        of_rows: gl.constexpr = gl.DotOperandLayout(1, mma, PART // 4)
        block, split = gl.program_id(0), gl.program_id(1)
        rounds = gl.cdiv(steps, warps)
        start = split * gl.cdiv(rounds, SPLITS)
        stop = gl.minimum(start + gl.cdiv(rounds, SPLITS), rounds)
        tile = block // (TILE // OUTPUTS)
        at = tile.to(gl.int64) * tile_bytes
        words, stored = words + at // 2, stored + at
        begin = block % (TILE // OUTPUTS) * OUTPUTS
        own = begin + gl.arange(0, OUTPUTS, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :]
        at_own = gl.arange(0, warps, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None]
        place = (begin + _second(OUTPUTS, of_codes)) * PART + _third(PART, of_codes)
        at_codes, at_row = _first(warps, of_codes), _first(warps, of_rows)
        lane, row = _second(PART, of_rows), _third(ROWS, of_rows)
        total = gl.zeros([warps, OUTPUTS, ROWS], gl.float32, mma)
        limit = gl.minimum(stop * warps, steps)
        held = _fetch(
            words, stored, start * warps, limit, place, at_codes, own, at_own, more, scales, least, factors, minima,
            zeros, TILE, MORE, PART, GROUP, FACTORS, LEAST, MINIMA, ZEROS, STEP, SPAN,
        )  # fmt: skip
        if EARLY:  # nothing on the way writes weights
            _wait(own)
        x_at = x + row * x_row + lane
        for turn in range(start, stop):
            following = _fetch(
                words, stored, (turn + 1) * warps, limit, place, at_codes, own, at_own, more, scales, least, factors,
                minima, zeros, TILE, MORE, PART, GROUP, FACTORS, LEAST, MINIMA, ZEROS, STEP, SPAN,
            )  # fmt: skip
            total = _add(
                total, held, x_at, turn * warps, at_row, at_codes, row < rows, limit, lane, channels, FULL, BITS, MORE,
                PART, GROUP, ZERO, SCALES, FACTORS, SIGNED, LEAST, MINIMA, ZEROS, STEP, SPAN, MAGIC, KIND,
            )  # fmt: skip
            held = following
        wide: gl.constexpr = min(warps, OUTPUTS // 32)
        flat: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [wide, warps // wide], [0, 1])
        whole = gl.convert_layout(gl.sum(total, 0), flat)
        output = gl.arange(0, OUTPUTS, gl.SliceLayout(1, flat))[:, None]
        row = gl.arange(0, ROWS, gl.SliceLayout(0, flat))[None, :]
        last = True
        if SPLITS > 1:
            size: gl.constexpr = OUTPUTS * ROWS
            put = parts + (block * SPLITS).to(gl.int64) * size + row * OUTPUTS + output
            gl.store(put + split * size, whole, mask=row < rows)
            barrier()  # all threads' stores come before the arrival that one of them announces
            last = gl.atomic_add(arrived + block, gl.cast(1, gl.int64), sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            if SPLITS > 1:
                whole = gl.zeros([OUTPUTS, ROWS], gl.float32, flat)
                for number in gl.static_range(SPLITS):  # in their order, whichever came last
                    whole += gl.load(put + number * size, mask=row < rows, other=0.0, volatile=True)
                gl.store(arrived + block, gl.cast(0, gl.int64))
            output += block * OUTPUTS
            real = (row < rows) & (output < outputs)
            if BIASED:
                whole += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)
            gl.store(out + row * outputs + output, whole.to(out.dtype.element_ty), mask=real)
