"""Launches beside launches: what waits for memory's answers, and what waits for its bandwidth, on two streams."""

from __future__ import annotations

from functools import cache
from types import TracebackType

import torch
from torch import Tensor


class Beside:
    """Launches within ``with`` run beside those that follow it, until :meth:`join`. What they share with others must
    have been made before, and is to be handed to :meth:`keep`. The first launch within, and the first after joining,
    wait for others than the one before them and must not begin early (``common.launched(early=False)``). Elsewhere
    than on a GPU nothing is different. ``ahead``: its programs go first, else those of the stream it left."""

    def __init__(self, device: torch.device, ahead: bool = True) -> None:
        self._device, self._ahead, self._kept = device, ahead, list[Tensor]()
        self._within: torch.cuda.StreamContext | None = None

    def keep(self, *tensors: Tensor) -> None:
        """Their memory is not given to others before the streams have joined."""
        self._kept += tensors

    def __enter__(self) -> Beside:
        if self._device.type == "cuda":
            stream = _stream(self._device, self._ahead)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._within = torch.cuda.stream(stream)
            self._within.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._within is not None:
            self._within.__exit__(kind, error, trace)
        if kind is not None:
            self.join()

    def join(self) -> None:
        """What follows waits for what ran beside."""
        if self._within is not None:
            torch.cuda.current_stream(self._device).wait_stream(_stream(self._device, self._ahead))
        self._kept.clear()


@cache
def _stream(device: torch.device, ahead: bool) -> torch.cuda.Stream:
    """Big programs find no room where small ones always come first: who has few of them goes ahead."""
    return torch.cuda.Stream(device, priority=-1 if ahead else 0)
