"""Sessions that survive their process: saved behind every turn, restored by name when they are asked for.

A session is a *group* of records in a store: a head (what was said, how it was computed, what the method knows, keys
and values of the open tail) and segments, which have the keys and values of so many tokens each and never change. A
save writes the segments that are new, then the head, then removes what the head does not name; so a process that is
killed leaves the session as it was after one of its turns. Nothing is used that is not what was written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor

from saccade.engine.loop import AsyncEngine
from saccade.engine.pieces import BeginRestore, Captured, CaptureSession, FinishRestore
from saccade.errors import RequestError, SaccadeError, shown
from saccade.sessions.groups import Groups
from saccade.sessions.heads import Head, Own, decode_head, encode_head, group_of
from saccade.sessions.save_queue import SaveQueue
from saccade.sessions.segments import SEGMENT_TOKENS, Segment, Segments
from saccade.sessions.shared_store import SharedFileStore
from saccade.sessions.snapshots import Snapshot, Snapshots
from saccade.sessions.stores import BlockStore

logger = logging.getLogger(__name__)


@dataclass
class Kept:
    """What the store has of a session that lives here: ``segments`` and ``snapshots`` in order, true of the keys and
    values that stand since ``mark``."""

    segments: list[Segment]
    mark: int
    snapshots: list[Snapshot]

    @property
    def keys(self) -> list[str]:
        """Of their records."""
        return [one.key for one in self.segments] + [one.key for one in self.snapshots]


@dataclass
class Restored:
    """A session that is back. ``number``: the engine's; ``data`` and ``tensors``: what its owner saved with it."""

    number: int
    note: str | None
    data: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Listed:
    """What is stored under one name. ``size``: bytes; ``used``: seconds since the epoch; ``why``: what is wrong with
    it, if it can be told."""

    owner: str
    name: str
    tokens: int
    size: int
    used: float
    why: str | None = None


class DurableSessions:
    """The sessions of one engine in ``store``, at most ``limit`` bytes of them: the least recently used go first. A
    session has a name, which is its ``owner``'s own. Every method may be called from any thread.

    ``counts``: saves, restores, ``bytes_written``, ``bytes_read``, ``tokens_restored``, ``tokens_recomputed``,
    ``refused``, ``failed`` (saves that the store did not take), ``removed`` (for room).
    """

    def __init__(
        self, store: BlockStore, loop: AsyncEngine, limit: int | None = None, segment: int = SEGMENT_TOKENS
    ) -> None:
        self.store = store
        self.last_error: str | None = None
        self._loop = loop
        self._lock = threading.RLock()
        self._kept: dict[str, Kept] = {}
        self._open: dict[str, int] = {}  # the engine's session of a group
        self._known: dict[str, int] = {}  # when the turn was stored, by any process, that the open session stands at
        self._groups = Groups(store, limit, lambda group: self._kept.pop(group, None))
        self.counts = self._groups.counts
        self.segments = Segments(store, self._groups, loop, segment)
        self.snapshots = Snapshots(store, self._groups, loop)
        self._saves = SaveQueue("saccade-sessions")  # by group

    @property
    def limit(self) -> int | None:
        """Most bytes that are stored; None for any number."""
        return self._groups.limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._groups.limit = limit

    @property
    def size(self) -> int:
        """Bytes that are stored."""
        return self._groups.size

    def has(self, name: str, owner: str = "") -> bool:
        """Whether there is a session of that name; it may still turn out to be damaged."""
        group = group_of(owner, name)
        return self._saves.pending(group) is not None or self.store.exists(self._groups.head(group))

    def superseded(self, name: str, owner: str = "") -> bool:
        """Whether another process has stored that session since this one has read or stored it, so that what it keeps
        in memory is an earlier turn. Looks into the folders of all processes."""
        group = group_of(owner, name)
        if not isinstance(self.store, SharedFileStore):
            return False
        if self._saves.pending(group) is not None:  # a turn of this process, which is about to be the last
            return False
        with self._lock:
            known = self._known.get(group)
        last = self.store.last_written(self._groups.head(group))
        return last is not None and (known is None or last > known)

    def opened(self, number: int, name: str, owner: str = "") -> None:
        """The engine's session ``number`` is the one of that name from now on."""
        with self._lock:
            self._open[group_of(owner, name)] = number

    def leave(self, number: int, name: str, owner: str = "") -> None:
        """Drop the engine's session ``number`` as soon as it is saved, without waiting."""
        group = group_of(owner, name)
        pending = self._saves.pending(group)
        with self._lock:
            if self._open.get(group) == number:
                del self._open[group]
                self._known.pop(group, None)
        if pending is None:
            self._loop.forget_soon(number)
        else:
            pending.add_done_callback(lambda _: self._loop.forget_soon(number))

    def wait(self, name: str, owner: str = "") -> None:
        """Wait until the last turn of that session is saved."""
        self._saves.wait(group_of(owner, name))

    def save_soon(
        self, number: int, name: str, data: dict[str, Any], tensors: dict[str, Tensor], owner: str = ""
    ) -> Future[None]:
        """Save the engine's session ``number`` as it is now, between two turns, in the background. What fails is
        counted, and told to the log; the next save tries again."""
        group = group_of(owner, name)
        captured: Future[Captured] = Future()
        try:
            captured = self._loop.piece(CaptureSession(number, self.segments.size))
        except SaccadeError as error:  # closed
            captured.set_exception(error)
        own = Own(group, name, owner, data, tensors)
        with self._lock:
            self._open[group] = number
        return self._saves.submit(group, partial(self._save, number, captured, own))

    def restore(self, name: str, owner: str = "", recompute: bool = False) -> Restored | None:
        """The session of that name as a new one of the engine; None where there is none. RequestError that says why
        where what is stored cannot be used: of another model, say, unless ``recompute`` takes over what was said alone.
        Keys and values that are damaged are computed again by the next turn, and ``note`` says which."""
        group = group_of(owner, name)
        with self._lock:
            if self._open.get(group) in self._loop.engine.sessions:
                raise RequestError(f"the session {shown(name)} is open already; close() it first")
        self._saves.wait(group)
        with self._groups.in_use(group):
            try:
                return self._restore(group, f"the session {shown(name)}", recompute)
            except RequestError:
                self.counts["refused"] += 1
                raise

    def forget(self, name: str, owner: str = "") -> bool:
        """Remove what is stored under a name; False where there is nothing."""
        group = group_of(owner, name)
        self._saves.wait(group)
        removed = self._groups.remove(group)
        if isinstance(self.store, SharedFileStore):
            removed |= self.store.forget(self._groups.head(group))
        return removed

    def stored(self) -> list[Listed]:
        """All sessions, the last used one first."""
        listed = []
        for group, (size, used) in self._groups.all().items():
            owner, name, tokens, why = "", group, 0, None
            try:
                content = self.store.get(self._groups.head(group))
                if content is None:
                    raise RequestError("its head is missing")
                head = decode_head(content, group)
                owner, name, tokens = head.own.owner, head.own.name, head.saved.data["tokens"]
            except SaccadeError as error:
                why = str(error)
            listed.append(Listed(owner, name, tokens, size, used, why))
        return sorted(listed, key=lambda one: -one.used)

    def flush(self) -> None:
        """Wait until what was to be saved is saved."""
        self._saves.flush()

    def close(self) -> None:
        """Finish what is to be saved and give the store back."""
        self._saves.close()
        self.segments.close()
        self.store.close()

    def report(self) -> dict[str, Any]:
        """``counts``, and what is stored."""
        names = ("saves", "restores", "bytes_written", "bytes_read", "tokens_restored", "tokens_recomputed")
        counted = {name: self.counts[name] for name in (*names, "refused", "failed", "removed")}
        return counted | {"sessions": len(self._groups), "bytes": self.size, "bytes_most": self.limit}

    # Saving, on the writer's thread

    def _save(self, number: int, captured: Future[Captured], own: Own) -> None:
        try:
            with self._groups.in_use(own.group):
                self._write(number, captured.result(), own)
            self.counts["saves"] += 1
        except Exception as error:  # the session itself goes on
            self.counts["failed"] += 1
            self.last_error = f"the session {shown(own.name)} was not saved: {error}"
            logger.warning("%s", self.last_error)

    def _write(self, number: int, captured: Captured, own: Own) -> None:
        group, saved = own.group, captured.saved
        saved.data["model"] = self._loop.engine.sessions.identity.data
        kept = self._kept.get(group)
        segments: list[Segment] = []
        snapshots: list[Snapshot] = []
        if kept is not None:
            stood = captured.stood.get(kept.mark, 0)
            segments = [one for one in kept.segments if one.stop <= stood]
            snapshots = [one for one in kept.snapshots if one.length <= stood]
        segments = self.segments.copy(group, number, captured, segments)
        snapshots = self.snapshots.copy(group, number, captured, snapshots)
        kept = Kept(segments, captured.mark, snapshots)
        head = Head(own, saved, segments, snapshots=snapshots)
        if not self._groups.put(self._groups.head(group), encode_head(head)):
            # What was said is kept in any case, and as many of the segments as there is room for.
            while snapshots and self._groups.over(group, kept.keys) > 0:
                snapshots.pop()
            while segments and self._groups.over(group, kept.keys) > 0:
                segments.pop()
            self._groups.put(self._groups.head(group), encode_head(head, said_alone=True), anyhow=True)
        if isinstance(self.store, SharedFileStore):
            self._stands(group, self.store.written(self._groups.head(group)))
        self._kept[group] = kept
        self._groups.keep(group, kept.keys)

    # Restoring, on the caller's thread

    def _restore(self, group: str, called: str, recompute: bool) -> Restored | None:
        shared = self.store if isinstance(self.store, SharedFileStore) else None
        stored = None if shared is None else shared.last_written(self._groups.head(group))
        content = self.store.get(self._groups.head(group))
        if content is None:
            return None
        self.counts["bytes_read"] += len(content)
        head = decode_head(content, called)
        if head.own.group != group:
            raise RequestError(
                f"{called} cannot be used: another session's record, {shown(head.own.name)}, is in its place"
            )
        saved, damaged = head.saved, head.damaged
        _ = self._loop.engine.sessions.identity  # found on this thread: the engine's is not to wait for it
        number = self._loop.piece(BeginRestore(saved, damaged, recompute)).result()
        note: str | None = self._loop.engine.sessions[number].note
        try:
            if saved.data["kv"] is not None and not recompute:
                loaded, lost = self.segments.load(number, head.segments, saved)
                if lost is None and damaged:
                    lost = f"damaged: {', '.join(damaged)}"
                states = self.snapshots.load(number, head.snapshots, saved)
                mark, note = self._loop.piece(FinishRestore(number, saved, lost)).result()
                old = not isinstance(saved.data["model"], Mapping)  # segments of an older form are written anew
                own_ones = takewhile(lambda one: not old and self._groups.has(one.key), loaded)  # others' may go
                states = [one for one in states if self._groups.has(one.key)]
                self._kept[group] = Kept(list(own_ones), mark, states)
        except BaseException:
            self._loop.forget(number)
            raise
        with self._lock:
            self._open[group] = number
        self._stands(group, stored)
        self._groups.used(group)
        computed = self._loop.engine.sessions[number].computed
        self.counts["restores"] += 1
        self.counts["tokens_restored"] += computed
        self.counts["tokens_recomputed"] += saved.data["tokens"] - computed if note else 0
        return Restored(number, note, head.own.data, head.own.tensors)

    # Both

    def _stands(self, group: str, stored: int | None) -> None:
        """The session in memory is the one that was stored then."""
        with self._lock:
            if stored is not None and group in self._open:
                self._known[group] = stored
