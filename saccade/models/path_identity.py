"""How sessions named their model before models.identity: by its class, its config with the folder's name and the
library's version, and samples of its weights. Sessions of that time are taken in where it can be shown whose they
are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 1024  # of a weight


def is_path_identity(stored: Any) -> bool:
    """Whether a stored name of a model is one of that time."""
    return isinstance(stored, str) and len(stored) == 32


def shows_this_model(stored: str, model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Whether ``stored`` is what a version of that time, with the library's version that is at work here, called
    ``model`` of these ``weights``, in its own order, by one of the names that its folder has: as it was given,
    absolute, relative, and without links."""
    samples = list(_samples(weights))
    return any(_digest(model, text, samples) == stored for text in _config_texts(model))


def _config_texts(model: nn.Module) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    if config is None:
        yield ""
        return
    text = str(config.to_json_string(use_diff=False))
    yield text
    said = json.loads(text)
    name = str(said.get("_name_or_path") or "")
    line = f'"_name_or_path": {json.dumps(name)}'
    if not name or text.count(line) != 1:
        return
    names = (os.path.abspath(name), os.path.realpath(name), _relative(name), _relative(os.path.realpath(name)))
    for other in dict.fromkeys(names):
        yield text.replace(line, f'"_name_or_path": {json.dumps(other)}')


def _relative(name: str) -> str:
    try:
        return os.path.relpath(name)
    except (OSError, ValueError):  # no folder to be in, another drive
        return name


def _samples(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, bytes]]:
    for name, weight in weights.items():
        flat = weight.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].cpu().contiguous()
        yield f"{name} {tuple(weight.shape)} {weight.dtype}", picked.view(torch.uint8).numpy().tobytes()


def _digest(model: nn.Module, config: str, samples: list[tuple[str, bytes]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for line in (type(model).__name__, config):
        digest.update(line.encode())
    for described, picked in samples:
        digest.update(described.encode())
        digest.update(picked)
    return digest.hexdigest()
