"""Lists in the texts of options, and context lengths among them."""

from __future__ import annotations

from saccade.errors import SaccadeError

LONGEST = 1 << 22  # tokens of a context


def parts(text: str, separator: str) -> list[str]:
    """What lies between separators, without the space around it; empty parts are left out."""
    return [part.strip() for part in text.split(separator) if part.strip()]


def lengths(text: str, least: int = 1) -> list[int]:
    """Context lengths of at least ``least`` tokens, written as 4096,16384. SaccadeError for others."""
    listed = parts(text, ",")
    for part in listed or [text]:
        if not part.isdecimal() or not least <= int(part) <= LONGEST:
            raise SaccadeError(
                f"contexts: '{part}' is not a length from {least} to {LONGEST}; write them as 4096,16384"
            )
    return [int(part) for part in listed]
