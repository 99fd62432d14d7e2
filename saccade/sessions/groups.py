"""Records of a store in groups, within a bound: the groups that were used least recently make room."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from saccade.sessions.stores import BlockStore

logger = logging.getLogger(__name__)
HEAD = "head"  # without this record the others of a group mean nothing


@dataclass
class Group:
    """What is stored of one. ``sizes``: bytes by key; ``used``: seconds since the epoch."""

    sizes: dict[str, int] = field(default_factory=dict)
    used: float = 0.0

    @property
    def size(self) -> int:
        return sum(self.sizes.values())


class Groups:
    """The index of ``store``, made from what it lists; at most ``limit`` bytes. A key is ``group/name``. ``gone`` is
    told of each group that is removed. Every method may be called from any thread.

    ``counts``: ``bytes_written``, and groups ``removed`` for room."""

    def __init__(self, store: BlockStore, limit: int | None, gone: Callable[[str], object]) -> None:
        self.store, self.limit = store, limit
        self.counts: Counter[str] = Counter()
        self._gone = gone
        self._lock = threading.RLock()
        self._busy: Counter[str] = Counter()  # groups that are written or read now
        self._groups: dict[str, Group] = {}
        for entry in store.list():
            group = self._groups.setdefault(entry.key.partition("/")[0], Group())
            group.sizes[entry.key] = entry.size
            group.used = max(group.used, entry.used)

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def size(self) -> int:
        """Bytes that are stored."""
        with self._lock:
            return sum(group.size for group in self._groups.values())

    def all(self) -> dict[str, tuple[int, float]]:
        """Bytes and the time of the last use, by group."""
        with self._lock:
            return {group: (one.size, one.used) for group, one in self._groups.items()}

    def head(self, group: str) -> str:
        """The key of a group's head."""
        return f"{group}/{HEAD}"

    def has(self, key: str) -> bool:
        """Whether a record is stored here."""
        with self._lock:
            group = self._groups.get(key.partition("/")[0])
            return group is not None and key in group.sizes

    def used(self, group: str) -> None:
        """A group was used now."""
        with self._lock:
            if group in self._groups:
                self._groups[group].used = time.time()

    @contextmanager
    def in_use(self, group: str) -> Iterator[None]:
        """It is not removed for room meanwhile."""
        with self._lock:
            self._busy[group] += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy[group] -= 1

    def put(self, key: str, content: bytes, anyhow: bool = False) -> bool:
        """Store a record; False where there is no room for it, unless it is to be stored ``anyhow``."""
        group = key.partition("/")[0]
        with self._lock:
            have = self._groups.setdefault(group, Group())
            while self.limit is not None and self.size - have.sizes.get(key, 0) + len(content) > self.limit:
                others = [one for one in self._groups if one != group and not self._busy[one]]
                if not others and anyhow:
                    break
                if not others:
                    logger.warning("no room for %s: the bound is %d bytes", key, self.limit)
                    return False
                self.remove(min(others, key=lambda one: self._groups[one].used))
                self.counts["removed"] += 1
        self.store.put(key, content)
        with self._lock:
            have.sizes[key], have.used = len(content), time.time()
        self.counts["bytes_written"] += len(content)
        return True

    def over(self, group: str, keys: Iterable[str]) -> int:
        """Bytes by which the bound is passed if ``group`` keeps no more than ``keys`` and its head as it is."""
        with self._lock:
            sizes, others = self._groups[group].sizes, self.size - self._groups[group].size
            kept = sum(sizes[key] for key in keys) + sizes.get(self.head(group), 0)
            return others + kept - (self.limit or 0)

    def keep(self, group: str, keys: Iterable[str]) -> None:
        """Remove what a group has beside its head and ``keys``."""
        named = {self.head(group), *keys}
        with self._lock:
            left = [key for key in self._groups[group].sizes if key not in named]
        for key in left:
            self._delete(group, key)

    def remove(self, group: str) -> bool:
        """Remove a whole group, its head first; False where there is none."""
        with self._lock:
            self._gone(group)
            have = self._groups.get(group)
            if have is None:
                return False
            for key in sorted(have.sizes, key=lambda key: key != self.head(group)):
                self._delete(group, key)
            del self._groups[group]
            return True

    def _delete(self, group: str, key: str) -> None:
        self.store.delete(key)
        with self._lock:
            self._groups[group].sizes.pop(key, None)
