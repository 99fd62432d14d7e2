"""The KV of one sequence outside any storage: saved whole or as rows, and taken in again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.kv.format import KVFormat
from saccade.kv.sequence import SequenceKV


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


def save_kv(kv: SequenceKV) -> SavedKV:
    """All that is stored, as copies on the storage's device. SaccadeError within a step, or where a block is not
    resident."""
    length = kv.between_steps("saved")
    views = [kv.view(layer) for layer in range(kv.layers)]
    tensors = {
        "k": torch.stack([view.keys() for view in views]),
        "v": torch.stack([view.values() for view in views]),
    }
    return SavedKV(tensors | kv.known.save(), described(kv.pool.format, kv.layers) | {"length": length})


def load_kv(pool: BlockManager, saved: SavedKV) -> SequenceKV:
    """A sequence of ``pool`` with what was saved. Raises SaccadeError where it does not fit the pool's format or
    layers, CapacityError, taking nothing, where the pool is short."""
    saved.check(pool.format, pool.layers)
    own = SequenceKV(pool)
    own.reserve(saved.metadata["length"])
    device = pool.storage.device
    for layer, (k, v) in enumerate(zip(saved.tensors["k"], saved.tensors["v"])):
        own.append(layer, k.to(device), v.to(device))
    own.known.load(saved.tensors, device)
    return own


def move_kv(kv: SequenceKV, pool: BlockManager) -> SequenceKV:
    """The sequence in another pool, on its device; ``kv`` is freed. Errors as for :func:`load_kv`, ``kv`` then being as
    before."""
    other = load_kv(pool, save_kv(kv))
    kv.free()
    return other


def copy_rows(kv: SequenceKV, start: int, stop: int) -> dict[str, Tensor]:
    """Tokens ``start .. stop - 1`` as copies on the host: ``k`` and ``v`` [layers, kv_heads, stop - start, head_dim],
    and under ``summary/<kind>/<block size>`` what is known of the full blocks that lie there [layers, blocks, parts,
    kv_heads, head_dim]."""
    views = [kv.view(layer) for layer in range(kv.layers)]
    tensors = {
        "k": torch.stack([view.keys(start, stop) for view in views]).cpu(),
        "v": torch.stack([view.values(start, stop) for view in views]).cpu(),
    }
    return tensors | kv.known.rows(start, stop)


def append_rows(kv: SequenceKV, tensors: Mapping[str, Tensor]) -> None:
    """Append what :func:`copy_rows` gave of the tokens that follow. CapacityError, changing nothing, where the pool is
    short; SaccadeError for rows of another shape."""
    start, (k, v) = kv.length, (tensors["k"], tensors["v"])
    format = kv.pool.format
    expected = (kv.layers, format.kv_heads, k.shape[2], format.head_dim)
    if not k.shape == v.shape == expected:
        raise SaccadeError(f"stored rows have the shape {list(k.shape)}, not {list(expected)}")
    kv.reserve(start + k.shape[2])
    device = kv.pool.storage.device
    for layer in range(kv.layers):
        kv.append(layer, k[layer].to(device), v[layer].to(device))
    kv.known.append_rows(tensors, start, device)
