"""How a row is stored, the values of one token's key, or value, of one KV head: the formats there are, and how torch
reads and writes them. csrc/row_codes.h does so in C++, ops/triton/readers.py on a GPU.

``int8`` has scales of its own for each row, so that a token is stored once and for all, whatever follows it: forks,
prefixes, chunks of a prompt and cuts back see the same bytes. A scale for each channel of a block would fit keys better
and would have to wait for the block's last token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import SaccadeError, shown

LARGEST = 127  # the greatest code
SCALED = 64  # channels of a row of codes that share a scale
WORD = 4  # bytes that hold two scales, of which a row is a multiple: a GPU copies no fewer at once
SCALE = torch.bfloat16  # with a float's range, and codes to spare: rounded, it moves the largest by half a code at most
LEAST = torch.finfo(SCALE).tiny  # of which bfloat16 has all its digits, and float32
READERS = {  # what reads rows, as an error calls it
    "triton": "a GPU's kernels",
    "cpu": "C++ kernels on a CPU",
    "reference": "the reference backend on a CPU",
}


class RowFormat:
    """Rows as they are, in their own dtype: ``auto``. ``number``: RowFormat in csrc/row_codes.h. ``read_by``: backends,
    of READERS."""

    name = "auto"
    number = 0
    read_by: tuple[str, ...] = ("triton", "cpu", "reference")
    turned = False  # whether keys are turned before (kv_rotate) by default
    multiple = 1  # of which head_dim is one
    coded = False  # in 8 bits each, with scales

    def dtype(self, rows: torch.dtype) -> torch.dtype:
        """Of the tensors that hold rows of dtype ``rows``."""
        return rows

    def width(self, head_dim: int) -> int:
        """Elements of a stored row."""
        return head_dim

    def head_dim(self, width: int) -> int:
        """Values of a row stored in ``width`` elements."""
        return width

    def encode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """``rows`` [..., head_dim] as they are stored: [..., width]. Stored rows come back as they are."""
        return rows.to(dtype)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of ``stored`` [..., width], in ``dtype``: [..., head_dim]."""
        return stored

    def step(self, stored: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What lies between a value and its neighbours, of which the nearest was stored, with what lies between numbers
        of ``dtype`` where the value is rounded to those as it is read: fp32 [..., head_dim]. No value that was stored
        is further than half of it from what is read. None where rows are as they were; inf where that is not known, of
        numbers below LEAST; what was so small that 0 is stored counts as 0."""
        return None


class HalfRows(RowFormat):
    """bfloat16 rows of a model that computes in float32; of one that computes in bfloat16 they are ``auto``."""

    name = "bf16"
    number = 2
    read_by = "cpu", "reference"

    def dtype(self, rows: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.to(dtype)

    def step(self, stored: Tensor, dtype: torch.dtype) -> Tensor | None:
        size = stored.float().abs()
        return torch.where((size > 0) & (size < LEAST), torch.inf, size * 2**-7)


class Int8Rows(RowFormat):
    """Codes from -127 to 127, and behind them for each 64 channels the bfloat16 that they are multiples of: a 127th of
    the largest value. A value has the nearest code, ties to even. Channels that share a scale with an infinity or a NaN
    read as NaN."""

    name = "int8"
    number = 1
    coded = True
    turned = True
    multiple = WORD

    def dtype(self, rows: torch.dtype) -> torch.dtype:
        return torch.int8

    def width(self, head_dim: int) -> int:
        return head_dim + WORD * -(-head_dim // (2 * SCALED))

    def head_dim(self, width: int) -> int:
        return width - WORD * -(-width // (2 * SCALED + WORD))

    def encode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if rows.dtype == torch.int8:
            return rows
        values = _scaled(rows.float())
        scale = values.abs().amax(-1, keepdim=True).div_(LARGEST)
        scale = torch.where(scale.isfinite(), scale, torch.nan).to(SCALE)
        codes = values.div_(scale.float()).round_().clamp_(-LARGEST, LARGEST)
        codes = torch.where(scale > 0, codes, 0).to(torch.int8).flatten(-2)[..., : rows.shape[-1]]
        scale = torch.nn.functional.pad(scale.flatten(-2), (0, scale.shape[-2] % 2))
        return torch.cat([codes, scale.contiguous().view(torch.int8)], -1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        values = self.head_dim(stored.shape[-1])
        exact = _scaled(stored[..., :values].float()).mul_(self.scales(stored)[..., None])
        return exact.flatten(-2)[..., :values].to(dtype)

    def scales(self, stored: Tensor) -> Tensor:
        """float32 [..., scales]."""
        values = self.head_dim(stored.shape[-1])
        return stored[..., values:].contiguous().view(SCALE)[..., : -(-values // SCALED)].float()

    def step(self, stored: Tensor, dtype: torch.dtype) -> Tensor | None:
        values = self.head_dim(stored.shape[-1])
        scales = self.scales(stored)
        known = torch.where((scales > 0) & (scales < LEAST), torch.inf, scales)  # too few digits for their own rounding
        step = known.repeat_interleave(SCALED, -1)[..., :values]
        if dtype == torch.float32:  # which has a code's digits and a scale's
            return step
        digits = torch.finfo(dtype)
        size = self.decode(stored, torch.float32).abs()
        return step + torch.where(size > 0, (digits.eps * size).clamp(min=digits.smallest_normal * digits.eps), 0.0)


def _scaled(rows: Tensor) -> Tensor:
    """float32 ``rows`` [..., head_dim] by channels that share a scale, as a copy: [..., scales, channels of each], 0
    where a row has ended."""
    channels = rows.shape[-1]
    each = min(channels, SCALED)
    return torch.nn.functional.pad(rows, (0, -channels % each)).unflatten(-1, (-1, each)).clone()


class Fp8Rows(RowFormat):
    """Codes in e4m3, and the float32 that they are multiples of: the least power of two, from 2^-126 on, by which the
    row's largest value is 448 at most. Values are rounded to the nearest code, ties to even. Rows with an infinity or a
    NaN read as NaN.

    A power of two loses nothing: e4m3 is as fine at 225 as at 448, and what it stands for is a number of 16 bits too,
    so that kernels may multiply codes and scale what comes of it, or the other way round. Rows are padded to a multiple
    of 8 bytes, which copies of a row take at once."""

    name = "fp8"
    number = 3
    coded = True
    multiple = 8

    def dtype(self, rows: torch.dtype) -> torch.dtype:
        return torch.uint8  # torch indexes no tensors of float8

    def width(self, head_dim: int) -> int:
        return head_dim + 2 * torch.float32.itemsize

    def head_dim(self, width: int) -> int:
        return width - 2 * torch.float32.itemsize

    def encode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if rows.dtype == torch.uint8:
            return rows
        values = rows.float()
        largest = values.abs().amax(-1, keepdim=True)
        # 448 is 1.75 * 2^8: beyond a mantissa of 1.75 the carry takes the next power.
        exponent = ((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8
        scale = (exponent.clamp(min=1) << 23).view(torch.float32)
        codes = torch.where(largest.isfinite(), values / scale, 0).to(torch.float8_e4m3fn).view(torch.uint8)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        tail = torch.cat([scale, torch.zeros_like(scale)], -1).view(torch.uint8)
        return torch.cat([codes, tail], -1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        values = self.head_dim(stored.shape[-1])
        scale = stored[..., values : values + 4].contiguous().view(torch.float32)
        return (stored[..., :values].contiguous().view(torch.float8_e4m3fn).float() * scale).to(dtype)

    def step(self, stored: Tensor, dtype: torch.dtype) -> Tensor | None:
        values = self.head_dim(stored.shape[-1])
        scale = stored[..., values : values + 4].contiguous().view(torch.float32)
        exponent = (stored[..., :values] & 0x7F) >> 3  # of codes below 2^-6 as of those above
        return torch.exp2(exponent.clamp(min=1).float() - 10) * scale


AUTO: RowFormat = RowFormat()
INT8: RowFormat = Int8Rows()
HALF: RowFormat = HalfRows()
FP8: RowFormat = Fp8Rows()
FORMATS = {one.name: one for one in (AUTO, HALF, INT8, FP8)}
CODED = {torch.int8: INT8, torch.uint8: FP8}  # by what holds them
NAMES = "auto", "bf16", "fp8", "int8"  # of an option kv_dtype


def check_name(name: object) -> None:
    """SaccadeError unless this is an option ``kv_dtype``."""
    if not isinstance(name, str) or name not in NAMES:
        raise SaccadeError(f"kv_dtype={shown(name)} is unknown; known: {', '.join(NAMES)}")


def format_called(name: str, dtype: torch.dtype, backend: str) -> RowFormat:
    """The format that ``kv_dtype=name`` stores rows of ``dtype`` in, where ``backend`` (``triton``, ``cpu`` or
    ``reference``) reads them. SaccadeError, naming the way out, where that does not read such rows."""
    check_name(name)
    found = AUTO if name == "bf16" and dtype == torch.bfloat16 else FORMATS.get(name)
    if found is None or backend not in found.read_by:
        readers = "GPUs alone" if found is None else " and ".join(READERS[one] for one in found.read_by)
        others = [one for one in NAMES if one in FORMATS and backend in FORMATS[one].read_by]
        raise SaccadeError(
            f"kv_dtype={name!r} is read by {readers}, and {READERS[backend]} would read it here; give kv_dtype="
            + " or ".join(map(repr, others))
        )
    return found


def format_of(pool: Tensor, dtype: torch.dtype) -> RowFormat:
    """The format of the rows of a pool [slots, kv_heads, block_size, width] that give numbers of ``dtype``."""
    if pool.dtype in CODED:
        return CODED[pool.dtype]
    return HALF if pool.dtype == torch.bfloat16 and dtype == torch.float32 else AUTO
