"""Which policies requests may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.errors import PolicyError
from saccade.methods.auto import ends
from saccade.methods.policy import PHASES, Policy, part_named

_ANY = "(*)"
OWN, NOTHING = "auto", "none"  # of --warm


@dataclass(frozen=True)
class PolicyRules:
    """``allowed``: policies as text, each allowing itself, or ``name(*)`` for a method with any options; policies whose
    every part has such a name are allowed too. None allows all. The server's default is always allowed."""

    allowed: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for text in self.allowed or ():
            name = text.strip().removesuffix(_ANY)
            if not text.strip().endswith(_ANY):
                Policy.parse(text)
            else:
                part_named(name)

    def allows(self, policy: Policy) -> bool:
        if self.allowed is None:
            return True
        free = {text.strip().removesuffix(_ANY) for text in self.allowed if text.strip().endswith(_ANY)}
        if any(Policy.parse(text) == policy for text in self.allowed if not text.strip().endswith(_ANY)):
            return True
        parts = {part.name for phase in PHASES if (part := getattr(policy, phase)) is not None}
        return (parts - {"dense"} or {"dense"}) <= free

    @property
    def text(self) -> str:
        return "all" if self.allowed is None else ", ".join(self.allowed) or "the server's default alone"


def to_warm(asked: Sequence[str], default: Policy, allowed: Sequence[str]) -> list[Policy]:
    """The policies that a server makes itself ready for: those ``asked`` for by name; for ``auto`` its ``default`` and
    those that are ``allowed`` with their options; for ``none`` none. A policy that is settled later counts as what it
    may become. PolicyError for what is none of these."""
    if NOTHING in asked:
        if len(asked) > 1:
            raise PolicyError(f"--warm {NOTHING} goes with no other; leave it out, or the others")
        return []
    named = [text for text in allowed if not text.strip().endswith(_ANY)] if OWN in asked else []
    texts = [*([default.text] if OWN in asked else []), *named, *(text for text in asked if text != OWN)]
    return list(dict.fromkeys(one for text in texts for one in ends(Policy.parse(text))))
