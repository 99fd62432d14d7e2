"""Policies: which method each phase of a request uses, and their text form.

``psa(epsilon=0.9)`` names a method with options; it serves the phases it knows and the others run dense. ``a + b``
combines methods, and adds a window (``psaw``) or a freeze (``etf``) to them: ``flexprefill + psa + etf``.
The same text is read in Python, on the command line, in YAML and in a request. Explicit assignment works too:
``prefill=streaming, decode=psa, window=psaw`` (as text or as a mapping).
"""

from __future__ import annotations

import ast
import difflib
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from saccade.errors import PolicyError, shown
from saccade.methods.base import FreezeMethod, Method, PolicyPart, WindowMethod
from saccade.methods.dense import DenseMethod
from saccade.methods.outside import load_outside, why_missing
from saccade.methods.registry import IN_CONTRIB, KNOWN, METHODS, PRESETS
from saccade.methods.tails import BlockMethod

LONGEST_TEXT = 2000  # every option of every place of a policy spelt out takes fewer characters
PHASES = ("prefill", "decode", "window", "freeze")  # the places of a policy
_parser = (
    threading.RLock()
)  # Python 3.11 counts the depth of all threads' trees in one place, and ends with SystemError


@dataclass(frozen=True)
class Policy:
    """One request's choice: a method for prefill and one for decode, and perhaps a window that both stay within and a
    freeze of prefill rows."""

    prefill: Method = field(default_factory=DenseMethod)
    decode: Method = field(default_factory=DenseMethod)
    window: WindowMethod | None = None
    freeze: FreezeMethod | None = None

    def __post_init__(self) -> None:
        for phase in PHASES:
            part = getattr(self, phase)
            if part is None and phase in ("window", "freeze"):
                continue
            if not isinstance(part, PolicyPart):
                raise PolicyError(f"{phase}={part!r} is not a method; known: {_known()}")
            if phase not in part.phases:
                role = f"does not select in {phase}" if phase in ("prefill", "decode") else f"is no {phase}"
                raise PolicyError(f"method '{part.name}' {role}, only in {', '.join(part.phases)}")
            if self.window is not None and isinstance(part, BlockMethod) and part.stands_in:
                raise PolicyError(
                    f"'{part.text}' does not go with the window '{self.window.name}'; leave one of them out"
                )

    @classmethod
    def parse(cls, policy: Policy | PolicyPart | str | Mapping[str, Any] | None) -> Policy:
        """Read a policy from text, a mapping with keys prefill, decode, window and freeze, a method, or a policy.

        Raises PolicyError naming the unknown method or option and listing the known ones.
        """
        if policy is None:
            return cls()
        if isinstance(policy, Policy):
            return policy
        if isinstance(policy, PolicyPart):
            return _combine([policy], policy.name)
        if isinstance(policy, Mapping):
            return _assign(dict(policy), shown(dict(policy)))
        if not isinstance(policy, str) or not policy.strip():
            raise PolicyError(f"a policy is text like 'flexprefill+psa', got {shown(policy)}; known: {_known()}")
        return _from_text(_readable(policy))

    @property
    def selects_by_chunk(self) -> bool:
        """Whether what a prefill reads, computes or remembers may hang on where its chunks end."""
        return not self.prefill.is_dense or self.freeze is not None or self.decode.watches

    @property
    def deferred(self) -> bool:
        """Whether it stands, in some phase, for methods that are named when a request comes (methods.auto)."""
        return self.prefill.deferred or self.decode.deferred

    @property
    def text(self) -> str:
        """Canonical text; ``Policy.parse(p.text) == p``."""
        methods, joined = self._methods_text()
        modifiers = {phase: part.text for phase in ("window", "freeze") if (part := getattr(self, phase)) is not None}
        if not joined:
            return ", ".join([methods, *(f"{phase}={text}" for phase, text in modifiers.items())])
        if modifiers and methods == "dense":
            return "+".join(modifiers.values())
        return "+".join([methods, *modifiers.values()])

    def _methods_text(self) -> tuple[str, bool]:
        """The text of both methods, and whether more may be joined to it by a plus."""
        if self.prefill == self.decode:
            return self.prefill.text, True
        for phase, other in (("prefill", self.decode), ("decode", self.prefill)):
            method = getattr(self, phase)
            if isinstance(other, DenseMethod) and method.phases == (phase,):
                return method.text, True
        if self.prefill.phases == ("prefill",) and self.decode.phases == ("decode",):
            return f"{self.prefill.text}+{self.decode.text}", True
        return f"prefill={self.prefill.text}, decode={self.decode.text}", False

    def __str__(self) -> str:
        return self.text


PolicyLike = Policy | PolicyPart | str | Mapping[str, Any] | None  # whatever Policy.parse reads; None is dense


def parse_method(text: str) -> Method:
    """``name`` or ``name(option=value, ...)`` with literal values, of a method."""
    part = parse_part(text)
    if not isinstance(part, Method):
        raise PolicyError(f"'{part.name}' is no method but a {part.phases[0]}; known methods: {', '.join(METHODS)}")
    return part


def parse_part(text: str) -> PolicyPart:
    """Like ``parse_method``, for windows and freezes too."""
    text = _readable(text)
    name, bracket, rest = text.partition("(")
    name = name.strip()
    if bracket and not rest.endswith(")"):
        raise PolicyError(f"policy '{text}' lacks its closing bracket")
    part = part_named(name)
    known = {f.name for f in fields(part)}
    methods = {f.name for f in fields(part) if isinstance(f.default, Method)}
    options = _options(text, rest[:-1], methods) if bracket else {}
    for option in options:
        if option not in known:
            allowed = ", ".join(sorted(known)) or "none"
            raise PolicyError(f"method '{name}' has no option '{option}'{_hint(option, known)}; known: {allowed}")
    try:
        return part(**options)
    except PolicyError as error:
        raise PolicyError(f"policy '{text}': {error}") from None


def part_named(name: str) -> type[PolicyPart]:
    """The method, window or freeze of a name. PolicyError, with what was probably meant, where there is none."""
    if name not in KNOWN:
        load_outside()
    if name in IN_CONTRIB and name not in KNOWN and why_missing(name) is None:
        raise PolicyError(f"method '{name}' is in saccade-contrib, which is not installed: pip install saccade-contrib")
    if name not in KNOWN:
        missing = "" if (why := why_missing(name)) is None else f" ({why})"
        raise PolicyError(f"unknown method '{name}'{_hint(name, KNOWN)}{missing}; known: {_known()}")
    return KNOWN[name]


def _readable(text: str) -> str:
    """``text`` without the space around it; PolicyError if it is so long that errors could not quote it."""
    text = text.strip()
    if len(text) > LONGEST_TEXT:
        raise PolicyError(
            f"a policy of {len(text)} characters ('{text[:40]}...') is too long: at most {LONGEST_TEXT} are read"
        )
    return text


def _from_text(text: str) -> Policy:
    if text in PRESETS:
        return _from_text(PRESETS[text])
    assignments = _split(text, ",;")
    if all(part.partition("=")[0].strip() in PHASES for part in assignments):
        pairs = [part.partition("=") for part in assignments]
        phases = [phase.strip() for phase, _, _ in pairs]
        if len(set(phases)) < len(phases):
            raise PolicyError(f"policy '{text}' assigns a phase twice")
        return _assign({phase.strip(): value for phase, _, value in pairs}, text)
    parts = [one for part in _split(text, "+") for one in _split(PRESETS.get(part.strip(), part), "+")]
    return _combine([parse_part(part) for part in parts], text)


def _assign(phases: dict[Any, Any], text: str) -> Policy:
    parts: dict[str, Any] = {}
    for phase, value in phases.items():
        if not isinstance(phase, str) or phase not in PHASES:
            raise PolicyError(f"policy '{text}' names the phase {shown(phase)}; known: {', '.join(PHASES)}")
        if not isinstance(value, (PolicyPart, str, type(None))):
            raise PolicyError(f"policy '{text}': {phase} must be a method or its text, got {shown(value)}")
        if value is not None:
            parts[phase] = parse_part(value) if isinstance(value, str) else value
    return Policy(**parts)


def _combine(methods: list[PolicyPart], text: str) -> Policy:
    """Methods that know one phase take it; those that know both share what is left, in order."""
    chosen: dict[str, Any] = {}
    flexible = [method for method in methods if len(method.phases) > 1]
    for method in [*(m for m in methods if len(m.phases) == 1), *flexible]:
        free = [phase for phase in method.phases if phase not in chosen]
        if not free:
            taken = ", ".join(f"{phase} is taken by '{chosen[phase].name}'" for phase in method.phases)
            raise PolicyError(f"policy '{text}': nothing is left for '{method.name}' ({taken})")
        for phase in free if len(flexible) == 1 else free[:1]:
            chosen[phase] = method
    return Policy(**chosen)


def _options(text: str, inside: str, methods: Collection[str] = ()) -> dict[str, Any]:
    """Options as written; the values of those in ``methods`` are methods."""
    try:
        with _parser:
            call = ast.parse(f"f({inside})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise PolicyError(f"policy '{text}' cannot be read; write options as name=value, ...") from None
    plain = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)  # not f(a=1)(a=2)
    if (
        not isinstance(call, ast.Call)
        or not plain
        or call.args
        or any(keyword.arg is None for keyword in call.keywords)
    ):
        raise PolicyError(f"policy '{text}': options are written name=value")
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        assert keyword.arg is not None
        if keyword.arg in options:
            raise PolicyError(f"policy '{text}' gives the option '{keyword.arg}' twice")
        if keyword.arg in methods:
            options[keyword.arg] = _inner(text, keyword.arg, keyword.value)
        else:
            options[keyword.arg] = _value(text, keyword.arg, keyword.value)
    return options


def _inner(text: str, option: str, node: ast.expr) -> Method:
    """A method as the value of an option."""
    if not isinstance(node, (ast.Name, ast.Call)):
        raise PolicyError(
            f"policy '{text}': the value of '{option}' must be one method, as in {option}=psa(epsilon=0.3)"
        )
    try:
        return parse_method(ast.unparse(node))
    except PolicyError as error:
        raise PolicyError(f"policy '{text}': {option}: {error}") from None


def _value(text: str, option: str, node: ast.expr) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if isinstance(node, ast.Name):  # a bare word: unit=kv_head
        return words.get(node.id.lower(), node.id)
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = ...
    if not isinstance(value, (int, float, str, bool, type(None))):
        raise PolicyError(f"policy '{text}': the value of '{option}' must be a number, a word, true, false or none")
    return value


def split_policies(text: str) -> list[str]:
    """Policies that are separated by commas outside brackets; a text that assigns phases (``decode=streaming``) is one
    policy. PolicyError for an empty one."""
    parts = [part.strip() for part in _split(text, ",")]
    return [text.strip()] if any("=" in part.partition("(")[0] for part in parts) else parts


def _split(text: str, separators: str) -> list[str]:
    """Split at separators outside brackets."""
    parts, depth = [""], 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        # The sign of an exponent (1e+3) stands inside brackets, so a bare + always separates.
        if char in separators and depth == 0:
            parts.append("")
        else:
            parts[-1] += text[at]
    if any(not part.strip() for part in parts):
        raise PolicyError(f"policy '{text}' has an empty part")
    return parts


def _known() -> str:
    load_outside()
    return ", ".join(sorted({*KNOWN, *PRESETS}))


def _hint(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean '{close[0]}'?)" if close else ""
