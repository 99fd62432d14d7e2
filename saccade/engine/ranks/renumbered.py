"""A store for torch's symmetric memory, in which ranks meet whatever their processes have exchanged before.

Symmetric memory numbers its exchanges through stores by a count of the whole process (torch's StoreExchange), whose
keys are ``CUDASymmetricMemory/NUMBER/RANK``. The first rank of an engine lives in a process that may have begun other
engines; the others begin in processes of their own. By its own count none would find what another wrote.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import Any

import torch.distributed as distributed

_KEY = re.compile(r"(.*?\D)(\d+)((?:/\d+)?)")  # what lies before a count, the count, perhaps a rank


class RenumberedStore(distributed.Store):
    """``store``, in which the first count of each name that this rank exchanges by is 0. Called by torch, from C++."""

    def __init__(self, store: distributed.Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def key(self, key: str) -> str:
        """As it is in ``store``."""
        found = _KEY.fullmatch(key)
        if found is None:
            return key
        name, count, rank = found.groups()
        return f"{name}{int(count) - self._first.setdefault(name, int(count))}{rank}"

    def set(self, key: str, value: Any) -> None:
        """Write ``value`` under ``key``."""
        self._store.set(self.key(key), value)

    def get(self, key: str) -> bytes:
        """What is under ``key``, once it is."""
        return self._store.get(self.key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """What is under each of ``keys``, once it is."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Write each value under its key."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """The number under ``key``, with ``amount`` added."""
        return self._store.add(self.key(key), amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """What is under ``key`` now: ``desired`` where it was ``expected``."""
        return self._store.compare_set(self.key(key), expected, desired)

    def delete_key(self, key: str) -> bool:
        """Whether there was anything under ``key``."""
        return self._store.delete_key(self.key(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there is something under all of ``keys``."""
        return self._store.check([self.key(key) for key in keys])

    def num_keys(self) -> int:
        """How many there are."""
        return self._store.num_keys()

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Return once there is something under all of ``keys``. DistStoreError where that takes too long."""
        own = [self.key(key) for key in keys]
        self._store.wait(own) if timeout is None else self._store.wait(own, timeout)

    def has_extended_api(self) -> bool:
        """Whether several keys can be asked for at once: here one after another."""
        return True
