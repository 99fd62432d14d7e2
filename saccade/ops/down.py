"""What goes from a device to the host while the device works on."""

from __future__ import annotations

import torch
from torch import Tensor


class Down:
    """A query on its way to the host, before the near part is launched, which it need not wait for."""

    def __init__(self, q: Tensor) -> None:
        self._sent: torch.cuda.Event | None = None
        self._here = q
        if q.is_cuda:
            self._here = torch.empty(q.shape, dtype=q.dtype, device="cpu", pin_memory=True)
            self._here.copy_(q, non_blocking=True)
            self._sent = torch.cuda.Event()
            self._sent.record()

    def wait(self) -> Tensor:
        """It, once it is here."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._here
