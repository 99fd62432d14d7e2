"""A copy of what a worker keeps of a sequence, as plain data and tensors on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from saccade.engine.memory.sequence_memory import SequenceMemory
from saccade.kv.saved import copy_rows, described, save_kv
from saccade.methods import state as states

LISTS = ("states", "tails", "gone", "watched")  # of a SequenceMemory, one entry a layer

KEPT = "kept"  # under which the state of the model's own layers lies
OLDER = "older"  # and those after fewer tokens, by their number


@dataclass(frozen=True)
class SavedMemory:
    """``tensors`` by name. ``kv`` says of what shape the keys and values are; ``known``, by the names of
    ``LISTS``, what the tensors of states mean: both as JSON can hold it."""

    tensors: dict[str, Tensor]
    kv: dict[str, Any]
    known: dict[str, Any]


def save_memory(memory: SequenceMemory, segment: int | None, older: Iterable[int] = ()) -> SavedMemory:
    """See ``Memories.save``."""
    known: dict[str, Any] = {}
    if segment is None:
        saved = save_kv(memory.kv)
        kv, rows = saved.metadata, {name: tensor.cpu() for name, tensor in saved.tensors.items()}
    else:
        length, pool = memory.kv.length, memory.kv.pool
        sealed = length // segment * segment
        kv = described(pool.format, pool.layers) | {"length": length, "sealed": sealed, "segment": segment}
        rows = copy_rows(memory.kv, sealed, length)
    tensors = {f"kv/{name}": tensor for name, tensor in rows.items()}
    for name in LISTS:
        own, known[name] = states.save(getattr(memory, name))
        tensors |= {f"{name}/{key}": tensor.cpu() for key, tensor in own.items()}
    kept = None if memory.kept is None else memory.kept.save(memory.kv.length)
    tensors |= {f"{KEPT}/{name}": tensor for name, tensor in (kept or {}).items()}
    for at in older:
        parts = None if memory.kept is None else memory.kept.save(at)
        tensors |= {f"{OLDER}/{at}/{name}": tensor for name, tensor in (parts or {}).items()}
    return SavedMemory(tensors, kv, known)
