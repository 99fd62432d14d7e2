"""How a decode method is measured beside others: which option is turned, and between which settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """``text``: the method as policy text, with ``{value}`` for the option that ``saccade eval board`` turns.
    ``turned``: what that option is: ``"share"`` of the keys, ``"keys"`` (a number, beside ``forced`` others), or its
    settings, sparsest first. ``summary``: bytes of a score against what stands for a key, over the bytes of a key; None
    where they are not known. ``ladder``: the settings of ``saccade bench recall``, with | between an option's values;
    None to leave it out."""

    text: str
    turned: str | tuple[str, ...]
    forced: int = 0
    summary: float | None = 0.0
    ladder: str | None = None
