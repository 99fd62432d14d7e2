"""The KV of one sequence outside any storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.format import KVFormat


@dataclass(frozen=True)
class SavedKV:
    """``tensors``: ``k`` and ``v`` [layers, kv_heads, length, head_dim], and kept summaries under
    ``summary/<layer>/<kind>/<block size>``. ``metadata``: version, layers, kv_heads, head_dim and length, numbers, and
    dtype, a name; a SavedKV can be written as any format of named tensors."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    def check(self, format: KVFormat, layers: int) -> None:
        """Raise SaccadeError unless storage of ``format`` with so many layers can take this in. Block sizes may
        differ."""
        for name, own in described(format, layers).items():
            if self.metadata.get(name) != own:
                raise SaccadeError(f"saved KV has {name}={self.metadata.get(name)!r}, but this storage has {own!r}")


def described(format: KVFormat, layers: int) -> dict[str, Any]:
    """What two stores must have in common for KV to go from one to the other."""
    return {
        "version": format.version,
        "layers": layers,
        "kv_heads": format.kv_heads,
        "head_dim": format.head_dim,
        "dtype": str(format.dtype).removeprefix("torch."),
    }
