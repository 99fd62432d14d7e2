"""A kernel that draws and nothing else, for the tests of both the interpreter and a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.triton.randomness import uniform


@triton.jit
def _draw(seeds, samples, positions, out, count, WIDTH: tl.constexpr):
    place = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = place < count
    seed, sample, position = (
        tl.load(seeds + place, mask=there, other=0),
        tl.load(samples + place, mask=there, other=0),
        tl.load(positions + place, mask=there, other=0),
    )
    tl.store(out + place, uniform(seed, sample, position), mask=there)


@triton.jit
def _draw_one(seed, sample, position, out):
    tl.store(out, uniform(seed, sample, position))


def draws(seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """int64 [count] each -> float64 [count]."""
    out = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    _draw[(triton.cdiv(len(seeds), 64),)](seeds, samples, positions, out, len(seeds), WIDTH=64)
    return out


def one_draw(seed: int, sample: int, position: int, device: str = "cpu") -> float:
    """Of plain numbers, as a kernel gets them for arguments."""
    out = torch.empty(1, dtype=torch.float64, device=device)
    _draw_one[(1,)](seed, sample, position, out)
    return float(out)
