"""A BlockStore in memory, with faults on request: what a disk, a power failure or a stranger may do to records."""

from __future__ import annotations

import random
import time

from saccade.errors import RequestError
from saccade.sessions.stores import Entry

FAULTS = ("torn", "flipped", "missing", "foreign", "stale", "swapped")


class MemoryStore:
    """``fail``: names of methods that raise from now on. :meth:`harm` damages what is stored."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.used: dict[str, float] = {}
        self.past: list[tuple[str, bytes]] = []  # some of what was replaced or deleted
        self.fail: set[str] = set()

    def get(self, key: str):
        self._may("get")
        if key in self.content:
            self.used[key] = time.time()
            return bytearray(self.content[key])
        return None

    def put(self, key: str, content: bytes) -> None:
        self._may("put")
        self._remember(key)
        self.content[key], self.used[key] = bytes(content), time.time()

    def delete(self, key: str) -> None:
        self._may("delete")
        self._remember(key)
        self.content.pop(key, None)

    def exists(self, key: str) -> bool:
        self._may("exists")
        return key in self.content

    def list(self) -> list[Entry]:
        self._may("list")
        return [Entry(key, len(content), self.used.get(key, 0.0)) for key, content in self.content.items()]

    def close(self) -> None:
        self.fail = {"get", "put", "delete", "exists", "list"}

    def _may(self, name: str) -> None:
        if name in self.fail:
            raise RequestError(f"the store cannot {name}")

    def _remember(self, key: str) -> None:
        if key in self.content:
            self.past = [*self.past[-20:], (key, self.content[key])]

    def harm(self, key: str, fault: str, rng: random.Random) -> bool:
        """Damage one record; False where there is nothing to do it with."""
        whole = self.content[key]
        if fault == "torn":
            self.content[key] = whole[: rng.randrange(len(whole))]
        elif fault == "flipped":
            torn = bytearray(whole)
            at = rng.randrange(min(len(torn), 4000) if rng.random() < 0.5 else len(torn))
            torn[at] ^= 1 << rng.randrange(8)
            self.content[key] = bytes(torn)
        elif fault == "missing":
            del self.content[key]
        elif fault == "foreign":  # a record of another session, of another model or policy perhaps
            own, kind = key.split("/")[0], key.endswith("/head")
            others = [one for one in self.content if one.split("/")[0] != own and one.endswith("/head") == kind]
            if not others:
                return False
            self.content[key] = self.content[rng.choice(others)]
        elif fault == "stale":  # an older record of the same session
            older = [content for name, content in self.past if name.split("/")[0] == key.split("/")[0]]
            if not older:
                return False
            self.content[key] = rng.choice(older)
        else:  # two records of one session have changed places
            others = [one for one in self.content if one != key and one.split("/")[0] == key.split("/")[0]]
            if not others:
                return False
            other = rng.choice(others)
            self.content[key], self.content[other] = self.content[other], whole
        return True
