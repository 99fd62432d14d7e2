"""The segments of stored sessions: keys and values of so many tokens each, which never change. They are copied from a
session of the engine into a store, and loaded from there into a session that is to go on (durable.py)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from saccade.engine.loop import AsyncEngine
from saccade.engine.memory.saved import SavedSession
from saccade.engine.pieces import Captured, CopyRows, LoadRows
from saccade.errors import RequestError, SaccadeError
from saccade.records import Record, decode_record, encode_record
from saccade.sessions.groups import Groups
from saccade.sessions.stores import BlockStore

SEGMENT = "saccade session segment"
SEGMENT_TOKENS = 1024
AHEAD = 3  # segments that are read while one is loaded


@dataclass(frozen=True)
class Segment:
    """A stored one: tokens ``start .. stop - 1``; ``seal``: its record's."""

    key: str
    start: int
    stop: int
    seal: str


class Segments:
    """Copies and loads the segments, of ``size`` tokens, of the engine's sessions. ``copy`` is called by one thread at
    a time, ``load`` by any."""

    def __init__(self, store: BlockStore, groups: Groups, loop: AsyncEngine, size: int) -> None:
        self.size = size
        self._store, self._groups, self._loop = store, groups, loop
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="saccade-sessions")

    def copy(self, group: str, number: int, captured: Captured, stored: list[Segment]) -> list[Segment]:
        """Write what the engine's session ``number`` has beyond ``stored``, its first segments, as it was when it was
        ``captured``. Returns all of them; fewer than there are where the store has no room, or the rows are gone."""
        data, segments = captured.saved.data, list(stored)
        stop = segments[-1].stop if segments else 0
        sealed = 0 if data["kv"] is None else data["kv"]["sealed"]
        while stop < sealed:
            start, stop = stop, min(stop + self.size, sealed)
            rows = self._loop.piece(CopyRows(number, captured.mark, start, stop)).result()
            if rows is None:  # gone in the meantime: what was said is kept, and these are computed again if need be
                break
            key = f"{group}/{start:010d}-{token_hex(8)}"
            record = Record(SEGMENT, _place(key, data["model"], start, stop), rows)
            if not self._groups.put(key, encode_record(record)):
                break
            segments.append(Segment(key, start, stop, record.seal))
        return segments

    def load(self, number: int, wanted: list[Segment], saved: SavedSession) -> tuple[list[Segment], str | None]:
        """Load segments into the engine's session ``number``, some read ahead; those that were loaded, and why the
        rest was not."""
        ahead = [self._readers.submit(self._read, one) for one in wanted[:AHEAD]]
        loaded: list[Segment] = []
        model, sealed = saved.data["model"], saved.data["kv"]["sealed"]
        for at, one in enumerate(wanted):
            try:
                record = ahead.pop(0).result()
            except SaccadeError as error:
                return loaded, str(error)
            if at + AHEAD < len(wanted):
                ahead.append(self._readers.submit(self._read, wanted[at + AHEAD]))
            if record.seal != one.seal or record.data != _place(one.key, model, one.start, one.stop):
                return loaded, f"another record is in the place of tokens {one.start} to {one.stop - 1}"
            if record.damaged:
                return loaded, f"tokens {one.start} to {one.stop - 1} are damaged: {', '.join(record.damaged)}"
            refusal = self._loop.piece(LoadRows(number, one.start, record.tensors)).result()
            if refusal is not None:
                return loaded, str(refusal)
            loaded.append(one)
        stop = loaded[-1].stop if loaded else 0
        return loaded, None if stop == sealed else f"tokens {stop} to {sealed - 1} were not stored"

    def close(self) -> None:
        """Give the threads back."""
        self._readers.shutdown()

    def _read(self, one: Segment) -> Record:
        content = self._store.get(one.key)
        if content is None:
            raise RequestError(f"the record of tokens {one.start} to {one.stop - 1} is missing")
        self._groups.counts["bytes_read"] += len(content)
        return decode_record(content, SEGMENT, f"the record of tokens {one.start} to {one.stop - 1}")


def _place(key: str, model: Any, start: int, stop: int) -> dict[str, Any]:
    return {"key": key, "model": model, "start": start, "stop": stop}
