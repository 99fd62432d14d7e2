"""API keys. What is stored of a key is its SHA-256. Keys made here have 256 random bits, so that it needs no salt."""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError, shown, whole_number
from saccade.server.policies import PolicyRules

SHORTEST = 16  # characters of a key that a person chose
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIELDS = {"name", "sha256", "max_concurrent", "requests_per_minute", "policies"}


@dataclass(frozen=True)
class Key:
    """Who asks. ``max_concurrent``: most samples at once; ``requests_per_minute``: most requests; None for no limit.
    ``policies``: what this key may choose of what the server allows."""

    name: str
    sha256: str
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    policies: PolicyRules = field(default_factory=PolicyRules)


class KeyRing:
    """The keys that a server knows; falsy without any."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys: dict[str, Key] = {}
        for key in keys:
            if key.sha256 in self._keys or any(key.name == other.name for other in self._keys.values()):
                raise SaccadeError(f"the API key {shown(key.name)} is given twice")
            self._keys[key.sha256] = key

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> Key | None:
        """The key that ``secret`` is. What is looked up is its digest, so the time says nothing about other keys."""
        return self._keys.get(digest(secret))

    def with_secret(self, secret: str, name: str = "environment") -> KeyRing:
        """These keys and one that is given openly."""
        if len(secret) < SHORTEST:
            raise SaccadeError(f"an API key of {len(secret)} characters is too easy to guess; give at least {SHORTEST}")
        return KeyRing([*self._keys.values(), Key(name, digest(secret))])

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """Keys of a TOML file with one ``[[key]]`` table each. SaccadeError where it is not one."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SaccadeError(f"the keys in {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SaccadeError(f"{path} is not valid TOML: {error}") from error
        tables = data.get("key")
        if set(data) != {"key"} or not isinstance(tables, list) or not tables:
            raise SaccadeError(f"{path} must hold [[key]] tables; saccade serve --new-key NAME makes one")
        return cls(_key(table, path) for table in tables)


def _key(table: Any, path: Path) -> Key:
    if not isinstance(table, Mapping) or not {"name", "sha256"} <= set(table) <= _FIELDS:
        raise SaccadeError(f"a [[key]] of {path} must have name and sha256, and may have {', '.join(sorted(_FIELDS))}")
    name, sha256 = table["name"], table["sha256"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SaccadeError(f"name={shown(name)} in {path} must be 1 to 64 letters, digits, dots, dashes or underscores")
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise SaccadeError(f"sha256 of the key {name} in {path} must be 64 hexadecimal digits")
    for field_name in ("max_concurrent", "requests_per_minute"):
        if field_name in table and not whole_number(table[field_name], 1):
            raise SaccadeError(f"{field_name}={shown(table[field_name])} of the key {name} must be an integer >= 1")
    policies = table.get("policies")
    if policies is not None and (not isinstance(policies, list) or not all(isinstance(one, str) for one in policies)):
        raise SaccadeError(f"policies of the key {name} must be a list of texts")
    rules = PolicyRules(None if policies is None else tuple(policies))
    return Key(name, sha256, table.get("max_concurrent"), table.get("requests_per_minute"), rules)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(name: str) -> tuple[str, str]:
    """A new key, which is shown once, and the table that a server knows it by."""
    if not _NAME.fullmatch(name):
        raise SaccadeError(f"name={shown(name)} must be 1 to 64 letters, digits, dots, dashes or underscores")
    secret = "sk-saccade-" + secrets.token_urlsafe(32)
    return secret, f'[[key]]\nname = "{name}"\nsha256 = "{digest(secret)}"\n'
