"""Which replica a request belongs to: the one that has its keys and values, if any has.

A request's *route* is a hash of the first of these that it has: the response that it goes on from, its session, its
``prompt_cache_key``, and how its prompt begins. Equal routes go to one replica, by the consistent hashing of Ray's
router.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from saccade.server.errors import ApiError
from saccade.server.shape import check_shape

MOST_NESTING = 64  # brackets within brackets of a body
ROUTE_HEADER = b"x-saccade-route"
PREFIX = 2048  # characters of a text that say where it belongs: the head of a system prompt, say, or of a document
_ROUTE = re.compile(r"[0-9a-f]{16}")
_ROUTED_ID = re.compile(r"resp_([0-9a-f]{16})-")
_RESPONSE_PATH = re.compile(r"/v1/responses/((?!compact$)[^/]+)(?:/input_items)?")
_SESSION_PATH = re.compile(r"/v1/sessions/([^/]+)")


def is_route(text: str) -> bool:
    return _ROUTE.fullmatch(text) is not None


def route_of(path: str, headers: Mapping[bytes, bytes], body: bytes) -> str:
    """The route of a request: 16 hexadecimal digits. Whatever the body is, there is one; who may ask is another's to
    decide."""
    if found := _RESPONSE_PATH.fullmatch(path):
        return _of_response(found[1])
    owner = (headers.get(b"authorization") or headers.get(b"x-api-key", b"")).decode("latin-1")
    if found := _SESSION_PATH.fullmatch(path):
        return _hashed("session", owner, found[1])
    asked = _asked(body)
    if not isinstance(asked, dict):
        asked = {}
    earlier = asked.get("previous_response_id")
    if isinstance(earlier, str):
        return _of_response(earlier)
    session = asked.get("session_id") or headers.get(b"x-session-id", b"").decode("latin-1")
    if session:
        return _hashed("session", owner, session)
    for name in ("prompt_cache_key", "cache_salt"):
        if asked.get(name):
            return _hashed(name, owner, asked[name])
    return _hashed("prefix", owner, _beginning(asked))


def _asked(body: bytes) -> Any:
    """What a body asks for; nothing where it is none, which the replica will say."""
    try:
        check_shape(body, MOST_NESTING)
        return json.loads(body) if body else {}
    except (ApiError, ValueError, RecursionError):
        return {}


def _of_response(name: str) -> str:
    """Ids of responses bear the route of the request that made them."""
    found = _ROUTED_ID.match(name)
    return _hashed("response", "", name) if found is None else found[1]


def _beginning(asked: dict[str, Any]) -> str:
    """How the prompt begins: the heads of all texts up to the user's first one. Later turns of a conversation begin the
    same, and users who have a system prompt in common are still told apart."""
    prompt = asked.get("prompt", asked.get("input"))
    messages = asked.get("messages", prompt)
    parts = [asked.get("instructions"), asked.get("tools")]
    for one in messages if isinstance(messages, list) and not _tokens(messages) else [messages]:
        parts.append(_said(one.get("content")) if isinstance(one, dict) else one)
        if isinstance(one, dict) and one.get("role") == "user":
            break
    return "\0".join((one if isinstance(one, str) else json.dumps(one, sort_keys=True))[:PREFIX] for one in parts)


def _said(content: Any) -> Any:
    """The texts of a content's parts: marks of caches beside them move from turn to turn."""
    if isinstance(content, list) and any(isinstance(one, dict) and "text" in one for one in content):
        return [one.get("text") for one in content if isinstance(one, dict)]
    return content


def _tokens(given: list[Any]) -> bool:
    return bool(given) and isinstance(given[0], int)


def _hashed(kind: str, owner: str, value: object) -> str:
    text = f"{kind}\0{owner}\0{value}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()
