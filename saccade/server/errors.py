"""Errors as OpenAI's clients know them: a status, and ``{"error": {message, type, param, code}}``. Anthropic's, of
``/v1/messages``, know others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import CapacityError, EngineLost, EngineStuck, SaccadeError, brief, shown

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = {**_KINDS, 408: "timeout_error", 409: "conflict_error", 413: "request_too_large", 504: "timeout_error"}
_ANTHROPIC |= {529: "overloaded_error"}
_TYPE = re.compile(r"str|int|float|bool|(list|dict)\[.*\]")  # of a field that may be of several, in pydantic's paths
_NAMED = re.compile(r"([a-z_]+)=")  # how the engine's messages begin when they are about one parameter


class ApiError(Exception):
    """What a request is answered with when it fails. ``code`` is for programs, ``param`` the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, brief(message), code, param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def for_path(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and body in the form that clients of ``path`` know."""
        if not is_anthropic(path):
            return self.status, self.body()
        status = 529 if self.code == "overloaded" else self.status
        kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
        code = {} if self.code is None else {"code": self.code}  # ours: an ingress knows by it whom to ask instead
        return status, {"type": "error", "error": {"type": kind, "message": self.message, **code}}

    def encoded(self, path: str = "") -> tuple[int, bytes]:
        """:meth:`for_path`, the body as JSON."""
        status, body = self.for_path(path)
        return status, json.dumps(body).encode()


def is_anthropic(path: str) -> bool:
    """Whether Anthropic's clients ask for ``path``."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def too_long(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, "context_length_exceeded", param)


def from_saccade(error: SaccadeError) -> ApiError:
    """What the engine says of bad input."""
    if isinstance(error, EngineLost):
        code = "engine_stuck" if isinstance(error, EngineStuck) else "engine_lost"
        return ApiError(503, f"{error}; ask another server", code, headers={"retry-after": "5"})
    if isinstance(error, CapacityError):
        return too_long(str(error))
    named = _NAMED.match(str(error))
    return bad_request(str(error), None if named is None else named[1])


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """``error`` with the field that is to blame called as ``names`` says the client called it. An entry of a list keeps
    its place and its name: the client's may have another."""
    if error.param is None or error.param not in names:
        return error
    name, rest = names[error.param], error.message.removeprefix(error.param)
    message = error.message if rest == error.message or rest.startswith("[") else name + rest
    return ApiError(error.status, message, error.code, name, error.headers)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first thing that is wrong with a body, of what pydantic found."""
    first: dict[str, Any] = errors[0] if errors else {"msg": "the body cannot be read", "loc": ()}
    path = _path(first)
    name = path[0] if path else None
    if first.get("type") == "json_invalid":
        place, why = (first.get("loc") or ("",))[-1], (first.get("ctx") or {}).get("error", "")
        return bad_request(f"the body is not valid JSON: {why} at character {place}", code="invalid_json")
    if first.get("type") == "extra_forbidden":
        return bad_request(
            f"{shown('.'.join(path))} is no field of this endpoint, or one that is not supported; see docs/server.md",
            shown(name)[1:-1],
            "unsupported_field",
        )
    path, said = _of_any_type(errors)
    where = ".".join(path)
    if first.get("type") != "missing" and isinstance(given := first.get("input"), str | int | float | None):
        said = f"{said[:300]}, got {shown(given[:99] if isinstance(given, str) else given, 60)}"
    if not where and first.get("type") == "missing":
        return bad_request("the body is empty; send a JSON object")
    message = f"{where[:200]}: {said[:400]}" if where else f"the body must be a JSON object: {said[:400]}"
    return bad_request(message, name[:100] if name else None)


def _path(error: Mapping[str, Any]) -> list[str]:
    """Where in the body an error lies."""
    return [str(part) for part in error.get("loc", ()) if part != "body"]


def _of_any_type(errors: Sequence[Any]) -> tuple[list[str], str]:
    """Where the first error lies, and what is wrong there. Of a field that may be of several types pydantic has an
    error for each, named in its path: the one that fitted furthest counts, or all that fitted not at all."""
    path = _path(errors[0]) if errors else []
    at = next((place for place, part in enumerate(path) if _TYPE.fullmatch(part)), None)
    if at is None:
        return path, str(errors[0].get("msg", "is not valid")) if errors else "is not valid"
    tried = [(loc[:at] + loc[at + 1 :], str(one.get("msg"))) for one in errors if (loc := _path(one))[:at] == path[:at]]
    path = max(
        (place for place, _ in tried),
        key=lambda place: [_index(part) for part in place],
    )
    said = " or ".join(dict.fromkeys(msg for place, msg in tried if place == path))
    return path, said.replace(" or Input should be ", " or ")


def _index(part: str) -> int:
    """A place in a list; 0 for a name, which may be digits, too."""
    return int(part) if part.isdecimal() and len(part) < 20 else 0
