"""A session outside of any engine: its tokens, how they were computed, its keys and values, what its method knows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from saccade.engine.sequence import Sequence, Span, usable
from saccade.errors import CapacityError, RequestError, SaccadeError
from saccade.kv.saved import SavedKV, copy_rows, described, load_kv, save_kv
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


def save_sequence(sequence: Sequence, model: str, chunk: int, segment: int | None = None) -> SavedSession:
    """A copy of all that a session is between two turns. ``model``: its :func:`fingerprint`; ``chunk``: of its
    prefills. With ``segment``, keys and values of whole segments of so many tokens are left out: whoever saves copies
    them one by one (engine.pieces). RequestError while a turn runs."""
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
        "private": sequence.private,
        "note": sequence.note,  # of an earlier restore, which no turn has told yet
        "spans": [
            [span.start, span.stop, span.phase, span.policy.text, span.length, span.after_cut]
            for span in sequence.spans
        ],
        "kv": None,
        "memory": kept,
    }
    if sequence.computed:
        try:
            if segment is None:
                saved = save_kv(memory.kv)
                data["kv"] = saved.metadata
                tensors |= {f"kv/{name}": tensor.cpu() for name, tensor in saved.tensors.items()}
            else:
                length, pool = memory.kv.length, memory.kv.pool
                sealed = length // segment * segment
                data["kv"] = described(pool.format, pool.layers) | {
                    "length": length,
                    "sealed": sealed,
                    "segment": segment,
                }
                tensors |= {f"kv/{name}": tensor for name, tensor in copy_rows(memory.kv, sealed, length).items()}
        except LostKV:  # whoever has it back computes it again
            sequence.drop_kv()
            return save_sequence(sequence, model, chunk, segment)
        for name in _LISTS:
            own, kept[name] = states.save(getattr(memory, name))
            tensors |= {f"{name}/{key}": tensor.cpu() for key, tensor in own.items()}
    return SavedSession(data, tensors)


def restore_sequence(
    sequence: Sequence, saved: SavedSession, model: str, chunk: int, damaged: list[str], recompute: bool
) -> str | None:
    """Make an empty sequence what was saved. Keys and values, or what a method knew, that cannot be had any more are
    left out, and the next turn computes them again; the sentence that is returned, and the report of that turn, say so.

    RequestError for a session of another model, or where chunks of a sparse prefill would lie elsewhere, unless
    ``recompute`` takes the tokens alone over.
    """
    begin_restore(sequence, saved, model, chunk, damaged, recompute)
    if recompute or not saved.data["computed"]:
        return sequence.note
    lost: Exception | None = SaccadeError(all_damaged(damaged)) if damaged else None
    if not any(name.startswith("kv/") for name in damaged):
        pool, parts = sequence.memory.kv.pool, under("kv", saved.tensors)
        try:
            sequence.memory.kv = load_kv(pool, SavedKV(parts, saved.data["kv"]))
        except (SaccadeError, KeyError, ValueError, TypeError) as error:
            lost = error
    return finish_restore(sequence, saved, chunk, lost)


def begin_restore(
    sequence: Sequence, saved: SavedSession, model: str, chunk: int, damaged: list[str], recompute: bool
) -> None:
    """The tokens of :func:`restore_sequence`, and how they were computed."""
    data = saved.data
    if "tokens" in damaged:
        raise RequestError("the saved session is damaged: its tokens are not what was written")
    if recompute:
        sequence.tokens = saved.token_ids
        sequence.restart()
        sequence.note = f"restored session: all {len(sequence.tokens)} tokens are computed again"
        return
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
    sequence.reached, sequence.seen = data["reached"], data["seen"]
    sequence.salt, sequence.private, sequence.note = data["salt"], data.get("private", False), data.get("note")
    if data["reached"] and not data["computed"] and sequence.note is None:  # they had made room for others
        sequence.note = (
            f"restored session: its keys and values were not stored; all {data['tokens']} tokens are computed again"
        )


def finish_restore(sequence: Sequence, saved: SavedSession, chunk: int, lost: Exception | None) -> str | None:
    """What the method knew, once keys and values are there. Where some are ``lost``, as much is kept of those that are
    there as lets the rest be computed as it was."""
    memory, data = sequence.memory, saved.data
    kv, wanted = memory.kv, data["computed"]
    try:
        if lost is not None:
            raise lost
        if kv.length != wanted:
            raise SaccadeError(f"keys of {kv.length} tokens where {wanted} were computed")
        for name in _LISTS:
            loaded = states.load(under(name, saved.tensors), data["memory"][name])
            if len(loaded) != kv.layers:
                raise SaccadeError(f"{name} of {len(loaded)} layers, not of {kv.layers}")
            setattr(memory, name, states.to(loaded, kv.pool.storage.device))
    except CapacityError as error:
        why = f"there is no room for its keys and values ({error})"
    except (SaccadeError, KeyError, ValueError, TypeError) as error:
        why = f"its keys and values, or what its method knew, cannot be used ({error})"
    else:
        sequence.filled(wanted)
        return sequence.note
    left = usable(sequence.spans, min(kv.length, wanted), chunk)
    memory.cut(left)
    memory.forget_method()
    sequence.computed = left
    again = f"tokens {left} to {data['tokens'] - 1}" if left else f"all {data['tokens']} tokens"
    sequence.note = f"restored session: {why}; {again} are computed again"
    logger.warning("%s", sequence.note)
    return sequence.note


def all_damaged(parts: list[str]) -> str:
    """What is to be said of damaged parts."""
    return f"damaged: {', '.join(parts[:4])}{' and more' if len(parts) > 4 else ''}"


def under(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of ``tensors`` that lie under a name, by the rest of theirs."""
    return {key.removeprefix(f"{name}/"): part for key, part in tensors.items() if key.startswith(f"{name}/")}
