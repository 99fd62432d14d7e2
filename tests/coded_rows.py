"""What the tests of rows in 8 bits share, on a CPU and on a GPU."""

from __future__ import annotations

import math

import torch
from helpers import generator

from saccade.kv.row_formats import RowFormat


def rounded(values: torch.Tensor, rows: RowFormat) -> torch.Tensor:
    return rows.decode(rows.encode(values, rows.dtype(values.dtype)), values.dtype)


def adversarial(dtype: torch.dtype, head_dim: int = 64) -> torch.Tensor:
    """Rows [n, head_dim]: zeros, ties between codes, an outlier, largest values at the edge of a power, the smallest
    numbers and the largest, none at all."""
    rows = torch.randn(16, head_dim, generator=generator(3))
    rows[0] = 0
    rows[1] = torch.arange(head_dim) / 16 + 1
    rows[1, 0] = 448.0  # a scale of 1: there are ties from 16 / 16 on
    rows[2, 7] = 4e4
    rows[3] *= 1e-36
    rows[4] *= 1e-39
    rows[5] *= 2e37
    rows[6, 3] = math.inf
    rows[7, 5] = math.nan
    rows[8] = -1.75
    rows[9] = 1.7578125
    rows[10] = torch.arange(head_dim) * 2.0**-10
    rows[10, 0] = 256.0  # beside which others are subnormal codes
    return rows.to(dtype)
