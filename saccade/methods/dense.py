"""Dense attention: every key, both phases. What all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from saccade.methods.base import Method


@dataclass(frozen=True)
class DenseMethod(Method):
    """Read everything."""

    name: ClassVar[str] = "dense"
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
