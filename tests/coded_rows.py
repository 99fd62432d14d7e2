"""What the tests of rows in 8 bits share, on a CPU and on a GPU."""

from __future__ import annotations

import math

import torch
from helpers import generator, planted_heads

from saccade.kv.row_formats import RowFormat
from saccade.kv.view import KVView


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


def views(dtype: torch.dtype, n: int, head_dim: int = 64, heads: int = 8, kv_heads: int = 2, *, rows: RowFormat):
    """Queries, and views of codes and of the values that these stand for, in scattered blocks."""
    q, k, v = (part.to(dtype) for part in planted_heads(heads, kv_heads, n, head_dim, seed=n))
    v[:, 5] *= 40
    k[:, 9] *= 2.0**-14
    coded = KVView.from_tensors(k, v, 32, shuffle_seed=1, rows=rows)
    plain = KVView.from_tensors(rounded(k, rows), rounded(v, rows), 32, shuffle_seed=2)
    return q, coded, plain


def same_values(coded: KVView, plain: KVView) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What two views of 77 keys, of codes and of the values that these stand for, say alike."""
    at = torch.tensor([76, 0, 33, 5])
    found = [
        (coded.keys(3, 71), plain.keys(3, 71)),
        (coded.values(), plain.values()),
        (coded.head_keys(1, 40), plain.head_keys(1, 40)),
        *zip(coded.take(at, 1), plain.take(at, 1)),
    ]
    coded.write(70, *coded.stored(10, 17))
    return [*found, (coded.keys(70), plain.keys(10, 17))]
