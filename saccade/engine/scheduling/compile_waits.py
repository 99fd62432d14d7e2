"""Time that requests waited for compilers of kernels: all requests that ran or queued meanwhile are charged."""

from __future__ import annotations

from dataclasses import replace

from saccade.engine.scheduling.scheduler import Scheduler
from saccade.ops import compiling


class CompileWaits:
    """Tells the reports of a scheduler's requests what this process's compiler (``ops.compiling``) has taken, where
    there is a GPU for which it compiles."""

    def __init__(self, scheduler: Scheduler, on_gpu: bool) -> None:
        self._scheduler, self._now = scheduler, compiling.watch() if on_gpu else compiling.compiled
        self._told = replace(self._now)

    @property
    def total(self) -> tuple[int, float]:
        """Kernels that this process has compiled, and in how many seconds. For any thread."""
        return self._now.kernels, self._now.seconds

    def settle(self) -> None:
        """Charge the compile time since the last call; called after work that may have launched new kernels."""
        if self._now.kernels == self._told.kernels:
            return
        kernels, seconds = self._now.kernels - self._told.kernels, self._now.seconds - self._told.seconds
        self._told = replace(self._now)
        for request in (*self._scheduler.running, *self._scheduler.waiting):
            request.report.compiled_kernels += kernels
            request.report.compile_seconds += seconds
