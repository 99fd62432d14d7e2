"""What was compiled before lies in a folder that outlives a server: whether all that it will launch is there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import saccade
from saccade.engine.settings.config import EngineConfig
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy
from saccade.models.checkpoint import open_config
from saccade.models.folders import checkpoint_folder
from saccade.ops import compiling

# Of a config, what kernels may hang on; the rest is where things lie, and who waits for whom.
_SETTINGS = (
    *(
        "dtype",
        "quantize",
        "max_model_len",
        "kv_dtype",
        "kv_rotate",
        "prefill_chunk",
        "max_requests",
        "block_size",
        "backend",
        "fa4",
    ),
    *("exact", "device", "cuda_graphs"),
)


def mark_of(config: EngineConfig, policies: Sequence[Policy]) -> Path | None:
    """The file that says that kernels of this model under these settings and ``policies`` were compiled, by these
    versions for these GPUs; None where that cannot be told."""
    folder = compiling.cache_folder()
    if folder is None:
        return None
    try:
        model = open_config(checkpoint_folder(config.model, config.revision)).whole
    except (SaccadeError, OSError):
        return None
    root = Path(saccade.__file__).parent
    code = [(str(one.relative_to(root)), one.stat().st_size, one.stat().st_mtime_ns) for one in root.rglob("*.py")]
    parts = [
        model,
        {name: str(getattr(config, name)) for name in _SETTINGS},
        [one.text for one in policies],
        {name: _version(name) for name in ("torch", "triton", "flash-attn-4")},
        sorted(code),
        sorted(_gpus()),
    ]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    return folder / f"saccade-{digest[:32]}"


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _gpus() -> list[str]:
    """Kinds of GPU of this machine, by what their driver says of them: to ask CUDA would keep forks from using them."""
    found = set()
    for one in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with suppress(OSError):
            found |= {line for line in one.read_text().splitlines() if line.startswith("Model:")}
    return list(found)
