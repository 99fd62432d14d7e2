"""On which GPU each rank of an engine computes."""

from __future__ import annotations

import torch

from saccade.engine.ranks.meeting import shares_gpus
from saccade.errors import SaccadeError
from saccade.models.target import checked_device


def device_of(device: str, rank: int, ranks: int) -> torch.device:
    """Where a ``rank`` of ``ranks`` computes whose first is on ``device``: on GPUs one behind the other, of those that
    CUDA_VISIBLE_DEVICES leaves."""
    first = checked_device(device)
    if first.type != "cuda" or ranks == 1:
        return first
    place = (first.index or 0) + rank
    return torch.device("cuda", place % torch.cuda.device_count() if shares_gpus() else place)


def check_devices(device: str, ranks: int) -> None:
    """SaccadeError where a rank finds no GPU here."""
    place = checked_device(device)
    if ranks == 1 or place.type != "cuda" or shares_gpus():
        return
    first, there = place.index or 0, torch.cuda.device_count()
    if first + ranks > there:
        raise SaccadeError(
            f"tensor_parallel_size={ranks} takes the GPUs {first} to {first + ranks - 1}; torch sees {there} of them "
            "(CUDA_VISIBLE_DEVICES): give fewer, or device='cpu'"
        )
