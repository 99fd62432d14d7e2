"""A block's keys as their mean and a basis of few directions, in few bits: LOCKS's page summary (docs/algorithms.md
6.24).

Of keys K [size, d] with the mean m: K - m = U S W' (singular values), of which the RANK greatest are kept. The
coefficients C = U S [size, RANK] are rounded to int8 with a scale a key, the basis W [d, RANK] to int4 with a scale a
direction, m to int8 with one scale. A record is bytes, one after the other: the basis by direction, two channels a byte
(the even one in the low half), the coefficients by key, the mean, and the scales in float16 (of directions, of keys, of
the mean), filled up with zeros to whole rows of d bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

RANK = 8
SEVEN, BYTE = 7.0, 127.0  # the greatest of int4 and int8, the same on both sides
TINY = 6.2e-5  # the least scale: above what float16 rounds to a denormal number


def record_bytes(size: int, head_dim: int) -> int:
    """Of one block's record, without what fills it up."""
    return RANK * head_dim // 2 + size * RANK + head_dim + 2 * (RANK + size + 1)


def record_rows(size: int, head_dim: int) -> int:
    """Rows of ``head_dim`` bytes that a record takes."""
    return -(-record_bytes(size, head_dim) // head_dim)


def packed(keys: Tensor) -> Tensor:
    """Records of blocks ``keys`` fp32 [..., size, d], d even: uint8 [rows, ..., d]. What is not finite counts as 0."""
    size, head_dim = keys.shape[-2:]
    keys = keys.float().nan_to_num(0.0, 0.0, 0.0)
    mean = keys.mean(-2)
    centred = keys - mean.unsqueeze(-2)
    greatest = centred.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
    centred = centred / greatest  # squares of large keys would overflow
    squares, left = torch.linalg.eigh(centred @ centred.transpose(-1, -2))  # rising
    missing = RANK - min(RANK, size)
    singular = squares[..., -RANK:].clamp(min=0).sqrt()
    left = left[..., -RANK:]
    coefficients = left * singular[..., None, :] * greatest
    basis = left.transpose(-1, -2) @ centred / singular.clamp(min=1e-10)[..., None]  # [..., RANK, d]
    basis = basis * (singular > 1e-6 * singular[..., -1:].clamp(min=1e-20))[..., None]  # no direction at all
    if missing:
        coefficients = torch.nn.functional.pad(coefficients, (missing, 0))
        basis = torch.nn.functional.pad(basis, (0, 0, missing, 0))
    four, by_direction = _rounded(basis, SEVEN)
    eight, by_key = _rounded(coefficients, BYTE)
    middle, scale = _rounded(mean, BYTE)
    low, high = (part & 15 for part in (four[..., 0::2], four[..., 1::2]))
    scales = torch.cat([by_direction, by_key, scale[..., None]], -1).to(torch.float16)
    parts = [(low | high << 4).to(torch.uint8), eight.view(torch.uint8), middle.view(torch.uint8)[..., None, :]]
    record = torch.cat([*(part.flatten(-2) for part in parts), scales.view(torch.uint8)], -1)
    rows = record_rows(size, head_dim)
    record = torch.nn.functional.pad(record, (0, rows * head_dim - record.shape[-1]))
    return record.unflatten(-1, (rows, head_dim)).movedim(-2, 0)


def unpacked(records: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """What ``records`` uint8 [blocks, rows, G, d] hold: bases fp32 [G, blocks, RANK, d], coefficients [G, blocks, size,
    RANK] and means [G, blocks, d]."""
    head_dim = records.shape[-1]
    flat = records.permute(2, 0, 1, 3).flatten(2)  # [G, blocks, bytes]
    counts = [RANK * head_dim // 2, size * RANK, head_dim, 2 * (RANK + size + 1)]
    four, eight, middle, scales = flat[..., : sum(counts)].split(counts, -1)
    scales = scales.contiguous().view(torch.float16).float()
    pairs = torch.stack([four & 15, four >> 4], -1).flatten(-2).to(torch.int8)  # [G, blocks, RANK * d]
    basis = ((pairs ^ 8) - 8).unflatten(-1, (RANK, head_dim)) * scales[..., :RANK, None]
    coefficients = eight.contiguous().view(torch.int8).unflatten(-1, (size, RANK)) * scales[..., RANK:-1, None]
    return basis, coefficients, middle.contiguous().view(torch.int8) * scales[..., -1:]


def _rounded(values: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Integers int8 of ``values`` over the scale of their last axis, and the scales, as float16 keeps them."""
    scale = (values.abs().amax(-1) / most).clamp(min=TINY, max=60000.0).to(torch.float16).float()
    return (values / scale[..., None]).round().clamp(-most, most).to(torch.int8), scale
