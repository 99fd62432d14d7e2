"""Files of what each KV head of a model reads, which ``saccade tune`` writes beside the policy that it keeps, and ranks
read to share heads out (``models.head_order``). They hang on the checkpoint's contents and its layers alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from saccade.models.checkpoint import open_checkpoint, weight_files
from saccade.models.head_order import HeadDensities
from saccade.models.tuned import read_tuned, tuned_home, tuned_homes, write_tuned

VERSION = 1  # of the files; those of another are not read
SAMPLE = 1024  # numbers, or bytes of blocks, in the middle of each tensor, by which a checkpoint is known


def keep_heads(folder: Path, layers: int | None, densities: HeadDensities) -> Path:
    """Write what was measured of the checkpoint in ``folder``, or of its first ``layers``; returns the file.
    RequestError where the system refuses."""
    file = tuned_home() / _name(folder, layers)
    write_tuned(file, {"version": VERSION, **asdict(densities)})
    return file


def find_heads(folder: Path, layers: int | None) -> HeadDensities | None:
    """What was measured; None where nothing was. SaccadeError, naming the file and the command, for a file that is
    broken."""
    if not any(any(one.glob("heads-*.json")) for one in tuned_homes()):  # no weight is looked at for nothing
        return None
    name = _name(folder, layers)
    file = next((found for one in tuned_homes() if (found := one / name).is_file()), None)
    return None if file is None else read_tuned(file, VERSION, _densities)


def _densities(data: dict[str, Any]) -> HeadDensities:
    return HeadDensities(**{**data, **{phase: _rows(data[phase]) for phase in ("prefill", "decode")}})


def _rows(data: Any) -> tuple[tuple[float, ...], ...]:
    rows = tuple(tuple(row) for row in data)
    if not all(isinstance(one, (int, float)) and 0 <= one <= 1 for row in rows for one in row):
        raise ValueError("a density is no number from 0 to 1")
    return rows


def _name(folder: Path, layers: int | None) -> str:
    """By samples of all tensors: what changes one changes more than a few of its numbers, and heads that are shared out
    by those of another checkpoint answer as well, in more time."""
    known = xxhash.xxh3_128(f"{layers}".encode())
    for name, one in _tensors(folder):
        flat = one.reshape(-1)
        first = max(0, len(flat) - SAMPLE) // 2
        known.update(f"{name} {one.dtype} {list(one.shape)}\n".encode())
        known.update(flat[first : first + SAMPLE].contiguous().view(torch.uint8).numpy().tobytes())
    return f"heads-{known.hexdigest()}.json"


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Those of the files, mapped: of each no more is read than is looked at."""
    checkpoint = open_checkpoint(folder)
    if checkpoint.gguf is None:
        for file in weight_files(checkpoint.path):
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    yield name, tensors.get_tensor(name)
        return
    from saccade.models.gguf_weights import Mapped, weights_of

    mapped = Mapped()
    for one in sorted(weights_of(checkpoint.gguf), key=lambda one: one.name):
        yield one.name, mapped.stored(one)
