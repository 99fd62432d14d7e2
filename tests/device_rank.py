"""A rank as ``python -m saccade.ranks`` is one, whose recorded steps run on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import os

import triton_helpers  # noqa: F401  (sets the interpreter up first)

from saccade import ranks
from saccade.engine import worker
from saccade.engine.device import backend
from saccade.engine.ranks import meeting


def device_backend(runner, setting, cuda_graphs, covers=True):
    """As ``saccade.engine.worker`` has it for a GPU."""
    made = backend.DeviceBackend(runner, cuda_graphs, setting.watch, covers)
    made.runs_ahead = os.environ.get("RUNS_AHEAD") == "1"
    return made


def join_beside_counts() -> None:
    """Join the model's numbers as GPUs are joined: without a word to who counts what ranks wait for on their hosts."""
    real = meeting.RankGroup._run

    def run(self, part, name):
        return getattr(self._host, name)(part) if part.is_floating_point() else real(self, part, name)

    meeting.RankGroup._run = run


if __name__ == "__main__":
    worker.device_backend = device_backend
    if os.environ.get("JOINS_BESIDE_COUNTS") == "1":
        join_beside_counts()
    ranks.main()
