"""What a row of every measurement is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Measured:
    """Base of rows: dataclasses of names and numbers."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, numbers to six places."""
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(self).items()}
