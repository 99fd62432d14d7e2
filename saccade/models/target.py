"""On which device a checkpoint runs, and in which dtype."""

from __future__ import annotations

import torch

from saccade.errors import ModelError, shown
from saccade.models.checkpoint import Checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checked_device(device: str | torch.device) -> torch.device:
    """The device of that name. ModelError for one that is unknown, or that torch does not see here."""
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"unknown device {shown(device)}; use auto, cpu, cuda or cuda:N") from error
    if target.type not in ("cpu", "cuda"):
        raise ModelError(f"device {str(target)!r} is not supported; use auto, cpu, cuda or cuda:N")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' was asked for but torch sees no GPU; use device='cpu'")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {str(target)!r} does not exist; torch sees {torch.cuda.device_count()} GPU(s)")
    return target


def run_dtype(checkpoint: Checkpoint, asked: torch.dtype | str, device: torch.device) -> tuple[torch.dtype, list[str]]:
    """What a checkpoint runs in on ``device``, and notes on what differs from what was ``asked``."""
    allowed = f"'auto', {', '.join(repr(name) for name in DTYPES)}"
    if isinstance(asked, torch.dtype):
        dtype = asked
    elif isinstance(asked, str) and asked == "auto":
        dtype = _own_dtype(checkpoint)
    elif isinstance(asked, str) and asked in DTYPES:
        dtype = DTYPES[asked]
    else:
        raise ModelError(f"unknown dtype {shown(asked)}; use one of {allowed}")
    if dtype == torch.float64 and isinstance(asked, str):
        return torch.float32, ["the checkpoint is float64; it runs in float32"]
    if dtype not in DTYPES.values():
        raise ModelError(f"dtype {dtype} is not supported; use one of {allowed}")
    if dtype == torch.float16 and device.type == "cpu" and asked == "auto" and checkpoint.packed is not None:
        return torch.bfloat16, [
            "float16 does not run on a CPU: the quantised model runs in bfloat16, in which few rows of activations are "
            "multiplied in 8 bits; pass dtype='float32' to multiply them as they are"
        ]
    if dtype == torch.float16 and device.type == "cpu":
        return torch.float32, [
            "float16 does not run on a CPU: the model runs in float32, which is exact and takes twice the memory; "
            "pass dtype='bfloat16' to halve it"
        ]
    return dtype, []


def _own_dtype(checkpoint: Checkpoint) -> torch.dtype:
    # A config without a dtype (or with one we do not know) leaves the choice to what the tensors are stored in.
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return {**DTYPES, "float64": torch.float64}.get(str(named).removeprefix("torch."), checkpoint.stored_dtype)
