"""How a row is stored, the values of one token's key, or value, of one KV head: the formats there are, and how torch
reads and writes them. csrc/row_codes.h does so in C++, ops/triton/readers.py on a GPU.

``int8`` has a scale for each row, so that a token is stored once and for all, whatever follows it: forks, prefixes,
chunks of a prompt and cuts back see the same bytes. A scale for each channel of a block would fit keys better and would
have to wait for the block's last token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import SaccadeError, shown

LARGEST = 127  # the greatest code


class RowFormat:
    """Rows as they are, in their own dtype: ``auto``. ``number``: RowFormat in csrc/row_codes.h."""

    name = "auto"
    number = 0

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


class Int8Rows(RowFormat):
    """Codes from -127 to 127, and the float32 that they are multiples of: a 127th of the row's largest value, rounded
    to the nearest code, ties to even. Rows with an infinity or a NaN read as NaN."""

    name = "int8"
    number = 1

    def dtype(self, rows: torch.dtype) -> torch.dtype:
        return torch.int8

    def width(self, head_dim: int) -> int:
        return head_dim + torch.float32.itemsize

    def head_dim(self, width: int) -> int:
        return width - torch.float32.itemsize

    def encode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if rows.dtype == torch.int8:
            return rows
        values = rows.float()
        scale = values.abs().amax(-1, keepdim=True) / LARGEST
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        codes = torch.where(scale > 0, (values / scale).round_(), 0).clamp_(-LARGEST, LARGEST).to(torch.int8)
        return torch.cat([codes, scale.contiguous().view(torch.int8)], -1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        values = self.head_dim(stored.shape[-1])
        scale = stored[..., values:].contiguous().view(torch.float32)
        return (stored[..., :values].float() * scale).to(dtype)


class Fp8Rows(RowFormat):
    """Codes in e4m3, and the float32 that they are multiples of: the least power of two, from 2^-126 on, by which the
    row's largest value is 448 at most. Values are rounded to the nearest code, ties to even. Rows with an infinity or a
    NaN read as NaN.

    A power of two loses nothing: e4m3 is as fine at 225 as at 448, and what it stands for is a number of 16 bits too,
    so that kernels may multiply codes and scale what comes of it, or the other way round. Rows are padded to a multiple
    of 8 bytes, which copies of a row take at once."""

    name = "fp8"
    number = 2

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


AUTO: RowFormat = RowFormat()
INT8: RowFormat = Int8Rows()
FP8: RowFormat = Fp8Rows()
FORMATS = {one.name: one for one in (AUTO, INT8, FP8)}


def format_called(name: object) -> RowFormat:
    """The format of this name, an option ``kv_dtype``."""
    if not isinstance(name, str) or name not in FORMATS:
        raise SaccadeError(f"kv_dtype={shown(name)} is unknown; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(pool: Tensor) -> RowFormat:
    """The format of the rows of a pool [slots, kv_heads, block_size, width]."""
    return {torch.int8: INT8, torch.uint8: FP8}.get(pool.dtype, AUTO)
