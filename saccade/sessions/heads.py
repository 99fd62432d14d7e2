"""The heads of stored sessions: all that is stored of one but for its segments, and which these are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from saccade.engine.memory.saved import SavedSession
from saccade.errors import RequestError, half_pair, shown, whole_number
from saccade.records import Record, decode_record, encode_record
from saccade.sessions.segments import Segment
from saccade.sessions.snapshots import Snapshot

HEAD = "saccade session head"
OWN = "own/"  # before the names of the owner's tensors


@dataclass(frozen=True)
class Own:
    """Whose session it is, and the ``data``, as JSON can hold it, and ``tensors`` that its owner saves with it.
    ``group``: see :func:`group_of`."""

    group: str
    name: str
    owner: str
    data: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Head:
    """``saved``: what the engine knows beside the keys and values in ``segments`` and the states in ``snapshots``;
    ``damaged``: those of its tensors that are not what was written, which are left out."""

    own: Own
    saved: SavedSession
    segments: list[Segment]
    damaged: list[str] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)


def group_of(owner: str, name: str) -> str:
    """What a session's records lie under, whatever its name looks like. RequestError for one that is no Unicode
    text."""
    for what, text in (("owner", owner), ("name", name)):
        if (why := half_pair(text)) is not None:
            raise RequestError(f"{what}={shown(text, 80)} cannot name a session: {why}")
    return "s" + hashlib.blake2b(f"{owner}\0{name}".encode(), digest_size=16).hexdigest()


def encode_head(head: Head, said_alone: bool = False) -> bytes:
    """A record of a head; ``said_alone``: of the engine's tensors with the tokens alone."""
    own, parts = head.own, head.saved.tensors
    about: dict[str, Any] = {"group": own.group, "name": own.name, "owner": own.owner, "own": own.data}
    about["segments"] = [[one.key, one.start, one.stop, one.seal] for one in head.segments]
    if head.snapshots:
        about["snapshots"] = [[one.key, one.length, one.seal] for one in head.snapshots]
    tensors = {"tokens": parts["tokens"]} if said_alone else parts
    tensors = tensors | {f"{OWN}{key}": tensor for key, tensor in own.tensors.items()}
    return encode_record(Record(HEAD, about | {"engine": head.saved.data}, tensors))


def decode_head(content: Any, called: str) -> Head:
    """What :func:`encode_head` wrote; ``called``: the name of the session in errors. RequestError where it is no head,
    or damaged beyond its tensors."""
    record = decode_record(content, HEAD, called)
    data, tensors = record.data, record.tensors
    wanted = {"group": str, "name": str, "owner": str, "own": dict, "engine": dict, "segments": list}
    if not isinstance(data, dict) or not all(isinstance(data.get(key), kind) for key, kind in wanted.items()):
        raise RequestError(f"{called} is malformed: it does not say {', '.join(wanted)}; forget it")
    if not whole_number(data["engine"].get("tokens"), 0):
        raise RequestError(f"{called} is malformed: it does not say how many tokens it has; forget it")
    own = {key.removeprefix(OWN): part for key, part in tensors.items() if key.startswith(OWN)}
    parts = {key: part for key, part in tensors.items() if not key.startswith(OWN)}
    return Head(
        Own(data["group"], data["name"], data["owner"], data["own"], own),
        SavedSession(data["engine"], parts),
        _segments(data["segments"], called),
        [name for name in record.damaged if not name.startswith(OWN)],
        _snapshots(data.get("snapshots", []), data["engine"], called),
    )


def _segments(listed: list[Any], called: str) -> list[Segment]:
    """Those of a head, each of which begins where the one before ends."""
    made: list[Segment] = []
    for one in listed:
        stop = made[-1].stop if made else 0
        right = isinstance(one, list) and len(one) == 4 and isinstance(one[0], str) and isinstance(one[3], str)
        if not right or not whole_number(one[1], stop, stop) or not whole_number(one[2], stop + 1):
            raise RequestError(f"{called} is malformed: {shown(one, 80)} is no segment from token {stop} on; forget it")
        made.append(Segment(*one))
    return made


def _snapshots(listed: Any, engine: dict[str, Any], called: str) -> list[Snapshot]:
    """Those of a head, rising, each of fewer tokens than there are."""
    made: list[Snapshot] = []
    for one in listed if isinstance(listed, list) else [listed]:
        least = made[-1].length + 1 if made else 1
        right = isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) and isinstance(one[2], str)
        if not right or not whole_number(one[1], least, max(0, engine["tokens"] - 1)):
            raise RequestError(
                f"{called} is malformed: {shown(one, 80)} is no snapshot after {least} tokens; forget it"
            )
        made.append(Snapshot(*one))
    return made
