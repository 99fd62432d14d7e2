"""What GPU tests of layers that keep a state share: how near to float64, in which types."""

from __future__ import annotations

from functools import partial

import torch
from gpu_helpers import BOUND
from keeping_helpers import slots_of

TYPES = (torch.bfloat16, torch.float16, torch.float32)
gpu_slots = partial(slots_of, device="cuda")


def near(out, expected, dtype, what):
    assert torch.isfinite(out).all(), what
    error = float((out.cpu().double() - expected).norm() / expected.norm())
    assert error < BOUND[dtype], (what, error)
