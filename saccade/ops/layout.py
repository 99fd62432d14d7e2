"""What kernels ask of a tensor's memory: they get an address and a stride at most, and know nothing else of it."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import SaccadeError


def rows(x: Tensor) -> Tensor:
    """``x`` with the values of its last axis one after another, for a kernel that is told the other strides; a copy
    where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` contiguous and of ``dtype``, for a kernel that is told no stride; a copy where it is not."""
    return x.to(dtype).contiguous()


def written(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x``, which a kernel writes to where it lies. SaccadeError unless it is contiguous and of ``dtype``: what is
    written to a copy would be lost."""
    if x.dtype != dtype or not x.is_contiguous():
        raise SaccadeError(
            f"{name} is written in place and must be contiguous {dtype}, got {x.dtype} of shape {tuple(x.shape)} with "
            f"strides {x.stride()}; pass x.contiguous() and copy the result back"
        )
    return x
