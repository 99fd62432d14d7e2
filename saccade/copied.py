"""Numbers on their way from a device to the host, which goes on meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Copied:
    """A copy of ``values``, tokens int64 [rows] say, on its way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._here.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._here = values.clone()

    def wait(self) -> list[Any]:
        """The values, once they are here; what was launched behind them may still run."""
        if self._event is not None:
            self._event.synchronize()
        return self._here.tolist()
