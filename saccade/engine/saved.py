"""A session outside of any engine: its tokens, how they were computed, its keys and values, what its method knows."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from saccade.engine.sequence import Sequence, Span
from saccade.errors import CapacityError, RequestError, SaccadeError
from saccade.kv.blocks import BlockManager
from saccade.kv.saved import SavedKV
from saccade.kv.sequence import SequenceKV
from saccade.kv.tier import LostKV
from saccade.methods import state as states
from saccade.methods.policy import Policy

logger = logging.getLogger(__name__)
SAMPLES = 1024  # of a weight, for its model's fingerprint
_LISTS = ("states", "tails", "gone", "watched")


@dataclass(frozen=True)
class SavedSession:
    """``data``: as JSON can hold it; ``tensors`` by name. It pickles, and fits a record (saccade.records)."""

    data: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return self.tensors["tokens"].tolist()


def fingerprint(model: nn.Module) -> str:
    """Tells models apart: names, shapes, dtypes and evenly spaced samples of all weights, and the configuration."""
    digest = hashlib.blake2b(digest_size=16)
    config = getattr(model, "config", None)
    for line in (type(model).__name__, str(config.to_json_string(use_diff=False)) if config is not None else ""):
        digest.update(line.encode())
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].cpu().contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(picked.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_sequence(sequence: Sequence, model: str, chunk: int) -> SavedSession:
    """A copy of all that a session is between two turns. ``model``: its :func:`fingerprint`; ``chunk``: of its
    prefills. RequestError while a turn runs."""
    if sequence.turn is not None:
        raise RequestError("this session is still answering; save it when the turn has ended")
    memory = sequence.memory
    tensors = {"tokens": torch.tensor(sequence.tokens, dtype=torch.int64, device="cpu")}
    kept: dict[str, Any] = {}
    data = {
        "model": model,
        "chunk": chunk,
        "tokens": len(sequence.tokens),
        "computed": sequence.computed,
        "reached": sequence.reached,
        "seen": sequence.seen,
        "salt": sequence.salt,
        "spans": [
            [span.start, span.stop, span.phase, span.policy.text, span.length, span.after_cut]
            for span in sequence.spans
        ],
        "kv": None,
        "memory": kept,
    }
    if sequence.computed:
        try:
            saved = memory.kv.save()
        except LostKV:  # whoever has it back computes it again
            sequence.drop_kv()
            return save_sequence(sequence, model, chunk)
        data["kv"] = saved.metadata
        tensors |= {f"kv/{name}": tensor.cpu() for name, tensor in saved.tensors.items()}
        for name in _LISTS:
            own, kept[name] = states.save(getattr(memory, name))
            tensors |= {f"{name}/{key}": tensor.cpu() for key, tensor in own.items()}
    return SavedSession(data, tensors)


def restore_sequence(
    sequence: Sequence, saved: SavedSession, model: str, chunk: int, damaged: list[str], recompute: bool
) -> str | None:
    """Make an empty sequence what was saved. Keys and values, or what a method knew, that cannot be had any more are
    left out, and the next turn computes them again; the sentence that is returned says so.

    RequestError for a session of another model, or where chunks of a sparse prefill would lie elsewhere, unless
    ``recompute`` takes the tokens alone over.
    """
    data = saved.data
    if "tokens" in damaged:
        raise RequestError("the saved session is damaged: its tokens are not what was written")
    if recompute:
        sequence.tokens = saved.token_ids
        sequence.restart()
        return f"all {len(sequence.tokens)} tokens are computed again"
    if data["model"] != model:
        raise RequestError(
            "the session was saved with another model, or with this one in another dtype; give recompute=True to "
            f"compute its {data['tokens']} tokens with this one"
        )
    spans = [
        Span(start, stop, phase, Policy.parse(text), length, cut)
        for start, stop, phase, text, length, cut in data["spans"]
    ]
    if data["chunk"] != chunk and not all(span.policy.prefill.is_dense for span in spans):
        raise RequestError(
            f"the session was saved with prefill_chunk={data['chunk']}, on which its sparse prefills hang, not "
            f"{chunk}; use that, or give recompute=True"
        )
    sequence.tokens, sequence.spans = saved.token_ids, spans
    sequence.reached, sequence.seen, sequence.salt = data["reached"], data["seen"], data["salt"]
    if not data["computed"]:
        return None
    try:
        if damaged:
            raise SaccadeError(f"damaged: {', '.join(damaged[:4])}{' and more' if len(damaged) > 4 else ''}")
        _fill(sequence, saved)
    except CapacityError as error:
        why = f"there is no room for its keys and values ({error})"
    except (SaccadeError, KeyError, ValueError, TypeError) as error:
        why = f"its keys and values, or what its method knew, cannot be used ({error})"
    else:
        sequence.computed = data["computed"]
        return None
    sequence.memory.drop()
    sequence.computed = 0
    note = f"restored session: {why}; all {data['tokens']} tokens are computed again"
    logger.warning("%s", note)
    return note


def _fill(sequence: Sequence, saved: SavedSession) -> None:
    memory, pool = sequence.memory, sequence.memory.kv.pool
    memory.kv = _loaded_kv(pool, saved)
    device = pool.storage.device
    for name in _LISTS:
        own = {key.removeprefix(f"{name}/"): part for key, part in saved.tensors.items() if key.startswith(f"{name}/")}
        loaded = states.load(own, saved.data["memory"][name])
        if len(loaded) != pool.layers:
            raise SaccadeError(f"{name} of {len(loaded)} layers, not of {pool.layers}")
        setattr(memory, name, states.to(loaded, device))
    if memory.kv.length != saved.data["computed"]:
        raise SaccadeError(f"keys of {memory.kv.length} tokens where {saved.data['computed']} were computed")


def _loaded_kv(pool: BlockManager, saved: SavedSession) -> SequenceKV:
    parts = {name.removeprefix("kv/"): part for name, part in saved.tensors.items() if name.startswith("kv/")}
    return SequenceKV.load(pool, SavedKV(parts, saved.data["kv"]))
