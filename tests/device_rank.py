"""A rank as ``python -m saccade.ranks`` is one, whose recorded steps run on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import os

import triton_helpers  # noqa: F401  (sets the interpreter up first)

from saccade import ranks
from saccade.engine import worker
from saccade.engine.device import backend


def device_backend(runner, setting, cuda_graphs, covers=True):
    """As ``saccade.engine.worker`` has it for a GPU."""
    made = backend.DeviceBackend(runner, cuda_graphs, setting.watch, covers)
    made.runs_ahead = os.environ.get("RUNS_AHEAD") == "1"
    return made


if __name__ == "__main__":
    worker.device_backend = device_backend
    ranks.main()
