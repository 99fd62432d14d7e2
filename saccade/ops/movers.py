"""What KV storage on a device is to be made with: the kernels that move its rows."""

from __future__ import annotations

import torch

from saccade.kv.rows import RowMover
from saccade.ops import cpu, triton


def row_mover(device: torch.device) -> RowMover | None:
    """None where torch's indexing serves: on devices without kernels of ours."""
    if device.type == "cpu" and cpu.available():
        from saccade.ops import cpu_pages

        return cpu_pages
    return triton.row_mover(device)
