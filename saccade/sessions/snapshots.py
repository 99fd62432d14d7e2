"""The snapshots of stored sessions: states of layers that keep one, after some of the tokens each. As segments are,
they are written once, and never change (durable.py)."""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from saccade.engine.loop import AsyncEngine
from saccade.engine.memory.saved import SavedSession
from saccade.engine.pieces import Captured, CopyState, LoadState
from saccade.errors import SaccadeError
from saccade.kv.sequence_states import spaced
from saccade.records import Record, decode_record, encode_record
from saccade.sessions.groups import Groups
from saccade.sessions.stores import BlockStore

SNAPSHOT = "saccade session snapshot"


@dataclass(frozen=True)
class Snapshot:
    """A stored one, after ``length`` tokens; ``seal``: its record's."""

    key: str
    length: int
    seal: str


class Snapshots:
    """Copies and loads those of the engine's sessions: as few as leave no token of a session that is restored more than
    ``EVERY`` behind one. Threads as of ``Segments``."""

    def __init__(self, store: BlockStore, groups: Groups, loop: AsyncEngine) -> None:
        self._store, self._groups, self._loop = store, groups, loop

    def copy(self, group: str, number: int, captured: Captured, stored: list[Snapshot]) -> list[Snapshot]:
        """Write what the engine's session ``number``, as it was ``captured``, needs beyond ``stored``, its first ones.
        Returns all of them; fewer where the store has no room, or some are gone."""
        data, made = captured.saved.data, list(stored)
        last = made[-1].length if made else 0
        for length in spaced(captured.snapshots, data["computed"], last):
            parts = self._loop.piece(CopyState(number, captured.mark, length)).result()
            if parts is None:
                continue
            key = f"{group}/state-{length:010d}-{token_hex(8)}"
            record = Record(SNAPSHOT, _place(key, data["model"], length), parts)
            if not self._groups.put(key, encode_record(record)):
                break
            made.append(Snapshot(key, length, record.seal))
        return made

    def load(self, number: int, wanted: list[Snapshot], saved: SavedSession) -> list[Snapshot]:
        """Load snapshots into the engine's session ``number``, as far as there is room for them. Returns those whose
        records are what was written; a session does without the others, and computes more again if it is edited."""
        sound: list[Snapshot] = []
        for one in wanted:
            called = f"the record of the state after {one.length} tokens"
            content = self._store.get(one.key)
            if content is None:
                continue
            self._groups.counts["bytes_read"] += len(content)
            try:
                record = decode_record(content, SNAPSHOT, called)
            except SaccadeError:
                continue
            if record.seal != one.seal or record.damaged:
                continue
            if record.data != _place(one.key, saved.data["model"], one.length):
                continue
            if self._loop.piece(LoadState(number, one.length, record.tensors)).result() is None:
                sound.append(one)
        return sound


def _place(key: str, model: Any, length: int) -> dict[str, Any]:
    return {"key": key, "model": model, "length": length}
