"""A session outside of any engine: its tokens, how they were computed, its keys and values, what its method knows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.engine.memory.memories import Memories
from saccade.engine.memory.saved_checks import (
    MalformedSession,
    check_counts,
    check_model,
    check_stored,
    check_tokens,
    read_spans,
    require,
)
from saccade.engine.memory.saved_memory import KEPT, LISTS, OLDER
from saccade.engine.memory.sequence import Sequence, usable
from saccade.engine.memory.sequence_memory import Cut
from saccade.errors import CapacityError, RequestError, SaccadeError, shown
from saccade.kv.saved import SavedKV
from saccade.kv.sequence_states import spaced
from saccade.kv.tier import LostKV
from saccade.methods import state as states
from saccade.methods.fitting import Fitting, Sizes

if TYPE_CHECKING:
    from saccade.models.loader import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedSession:
    """``data``: as JSON can hold it; ``tensors`` by name. It pickles, and fits a record (saccade.records)."""

    data: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return self.tensors["tokens"].tolist()


def save_sequence(
    sequence: Sequence, model: dict[str, Any] | None, chunk: int, segment: int | None = None
) -> SavedSession:
    """A copy of all that a session is between two turns. ``model``: its identity, None where the caller adds it;
    ``chunk``: of its prefills. With ``segment``, keys and values of whole segments of so many tokens are left out:
    the caller copies them one by one (engine.pieces). RequestError while a turn runs."""
    if sequence.turn is not None:
        raise RequestError("this session is still answering; save it when the turn has ended")
    tensors = {"tokens": torch.tensor(sequence.tokens, dtype=torch.int64, device="cpu")}
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
        "memory": {},
    }
    if sequence.computed:
        try:
            older = () if segment is not None else spaced(sequence.snapshots(chunk), sequence.computed)
            memory = sequence.memories.save(sequence.id, segment, older)
        except LostKV:  # restoring computes it again
            sequence.drop_kv()
            return save_sequence(sequence, model, chunk, segment)
        data["kv"], data["memory"] = memory.kv, memory.known
        tensors |= memory.tensors
    return SavedSession(data, tensors)


def restore_sequence(
    sequence: Sequence, saved: SavedSession, model: LoadedModel, chunk: int, damaged: list[str], recompute: bool
) -> str | None:
    """Make an empty sequence what was saved. Keys and values, or what a method knew, that cannot be had any more are
    left out, and the next turn computes them again; the sentence that is returned, and the report of that turn, say so.

    RequestError for a session of another model, or where chunks of a sparse prefill would lie elsewhere, unless
    ``recompute`` takes the tokens alone over; MalformedSession for what no version has written.
    """
    begin_restore(sequence, saved, model, chunk, damaged, recompute)
    if recompute or not saved.data["computed"]:
        return sequence.note
    needed = [name for name in damaged if not name.startswith(f"{OLDER}/")]
    lost: Exception | None = SaccadeError(all_damaged(needed)) if needed else None
    if not any(name.startswith("kv/") for name in damaged):
        try:
            kv = SavedKV(under("kv", saved.tensors), saved.data["kv"])
            sequence.kv = sequence.memories.load(sequence.id, kv)
            for length, parts in older(saved, damaged):
                sequence.memories.load_snapshot(sequence.id, length, parts)
        except MalformedSession:
            raise
        except SaccadeError as error:
            lost = error
    return finish_restore(sequence, saved, model, chunk, lost)


def begin_restore(
    sequence: Sequence, saved: SavedSession, model: LoadedModel, chunk: int, damaged: list[str], recompute: bool
) -> None:
    """The tokens of :func:`restore_sequence`, and how they were computed."""
    data = saved.data
    if "tokens" in damaged:
        raise RequestError("the saved session is damaged: its tokens are not what was written")
    tokens = check_tokens(saved.tensors.get("tokens"), data, model.spec.vocab_size)
    if recompute:
        sequence.tokens = tokens
        sequence.restart()
        sequence.note = f"restored session: all {len(sequence.tokens)} tokens are computed again"
        return
    check_model(data.get("model"), model, len(tokens))
    check_counts(data, model.spec.max_position)
    spans = read_spans(data)
    check_stored(data)
    sequence.memories.check_policies(span.policy for span in spans)
    if data["chunk"] != chunk and not all(span.policy.prefill.is_dense for span in spans):
        raise RequestError(
            f"the session was saved with prefill_chunk={data['chunk']}, on which its sparse prefills depend, not "
            f"{chunk}; use that, or give recompute=True"
        )
    sequence.tokens, sequence.spans = tokens, spans
    sequence.reached, sequence.seen = data["reached"], data["seen"]
    sequence.salt, sequence.private, sequence.note = data.get("salt"), data.get("private", False), data.get("note")
    if data["reached"] and not data["computed"] and sequence.note is None:  # they had made room for others
        sequence.note = (
            f"restored session: its keys and values were not stored; all {data['tokens']} tokens are computed again"
        )


def finish_restore(
    sequence: Sequence, saved: SavedSession, model: LoadedModel, chunk: int, lost: Exception | None
) -> str | None:
    """What the method knew, once keys and values are there. Where some are ``lost``, as much is kept of those that are
    there as lets the rest be computed as it was. MalformedSession for keys or states that cannot be of this session."""
    memories, data = sequence.memories, saved.data
    if isinstance(lost, MalformedSession):
        raise lost
    kv, wanted = sequence.kv, data["computed"]
    try:
        if lost is not None:
            raise lost
        if kv.length != wanted:
            raise SaccadeError(f"the saved session has keys of {kv.length} tokens, but {wanted} were computed")
        spec, seen = model.spec, max(wanted, data["seen"])
        dtype = kv.pool.format.dtype
        sizes = [Sizes(spec.layers, spec.heads, *spec.shape(layer), seen, dtype) for layer in range(spec.layers)]
        memories.load_states(sequence.id, {name: _read_list(name, saved, sizes, memories) for name in LISTS})
        memories.load_kept(sequence.id, wanted, under(KEPT, saved.tensors))
    except MalformedSession:
        raise
    except CapacityError as error:
        why = f"there is no room for its keys and values ({error})"
    except SaccadeError as error:
        why = f"its keys and values, or what its method knew, cannot be used ({error})"
    else:
        sequence.filled(wanted)
        return sequence.note
    left = usable(sequence.spans, min(kv.length, wanted), chunk)
    memories.truncate(sequence.id, left, Cut.FORGOTTEN)
    sequence.computed = left
    left -= sequence.resume(chunk)  # where the model's layers have a state
    again = f"tokens {left} to {data['tokens'] - 1}" if left else f"all {data['tokens']} tokens"
    sequence.note = f"restored session: {why}; {again} are computed again"
    logger.warning("%s", sequence.note)
    return sequence.note


def _read_list(name: str, saved: SavedSession, every: list[Sizes], memories: Memories) -> list[Any]:
    """What one of the lists of a memory holds for each layer, of which ``every`` has the sizes. MalformedSession where
    that cannot be; SaccadeError for states of another version, or that ``memories`` do not take."""
    loaded = states.load(under(name, saved.tensors), saved.data["memory"][name])
    require(isinstance(loaded, list) and len(loaded) == len(every), f"it has no {name} of {len(every)} layers")
    if any(one is not None for one in loaded):
        memories.check_known()
    fitting = Fitting(f"session's {name}")
    try:
        for one, sizes in zip(loaded, every):
            if name == "tails" and one is not None:
                fitting.tensor("rows", one, sizes.dtype, sizes.heads, None, sizes.head_dim)
            if name == "gone" and one is not None:
                fitting.tensor("units", one, torch.bool, (1, *sizes.units), None)
                fitting.within("keys", one.shape[1], 0, sizes.length)
            fitting.require(states.can_copy(one), f"has a {type(one).__name__}")
            states.check(one, sizes)
    except SaccadeError as error:
        raise MalformedSession(str(error)) from None
    return loaded


def older(saved: SavedSession, damaged: list[str]) -> list[tuple[int, dict[str, Tensor]]]:
    """The older snapshots of a session that was saved whole, those of ``damaged`` parts aside, by their tokens.
    MalformedSession for such as cannot be of it."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, part in under(OLDER, saved.tensors).items():
        length, _, own = name.partition("/")
        right = length.isdecimal() and 0 < int(length) < saved.data["computed"]
        require(right, f"it has a state after {shown(length, 40)} tokens of {saved.data['computed']}")
        found.setdefault(int(length), {})[own] = part
    torn = {int(one.split("/")[1]) for one in damaged if one.startswith(f"{OLDER}/")}
    return [(length, parts) for length, parts in sorted(found.items()) if length not in torn]


def all_damaged(parts: list[str]) -> str:
    """What is to be said of damaged parts."""
    return f"damaged: {', '.join(parts[:4])}{' and more' if len(parts) > 4 else ''}"


def under(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of ``tensors`` that lie under a name, by the rest of theirs."""
    return {key.removeprefix(f"{name}/"): part for key, part in tensors.items() if key.startswith(f"{name}/")}
