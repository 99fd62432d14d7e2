"""Kernels that run beside those of the current stream: small ones leave a device idle that others could use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

# Options of a launch that waits for kernels of two streams, or for one of the other stream: it does not start early
# (common.launched), which is for what follows one kernel in its own stream.
LATE = {"EARLY": False, "launch_pdl": False}
wanted = True


@cache
def _side(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """Of each stream its own: others' recordings have nothing to do with it."""
    return torch.cuda.Stream(stream.device)


class Beside:
    """A stream beside the current one. What is launched under :meth:`run` follows all that was launched before this
    object was made; what is launched after :meth:`join` follows that, too. Between the two the current stream goes on.
    The first kernel of either is launched ``LATE``. Both may be recorded in a graph. On a CPU things go one by one.

    A tensor made on one stream and read on the other must live until both have joined."""

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda" and wanted:
            current = torch.cuda.current_stream(device)
            self._streams = current, _side(current)
            self._streams[1].wait_stream(self._streams[0])

    @contextmanager
    def run(self) -> Iterator[None]:
        if self._streams is None:
            yield
            return
        with torch.cuda.stream(self._streams[1]):
            yield

    def join(self) -> None:
        if self._streams is not None:
            self._streams[0].wait_stream(self._streams[1])
